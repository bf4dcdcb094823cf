"""The command that runs lint and the tests beside each other."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.suite import commands, exit_code


def test_lint_is_run_by_make() -> None:
    tests, lint = commands(["--lint", "tests/faults"])
    assert lint == ["make", "--no-print-directory", "lint"]
    assert tests[-1] == "tests/faults" and "--lint" not in tests
    assert commands(["tests/faults"]) == (tests, [])


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([0, 2], 2),
        ([1, 2], 1),
        ([5, 0], 5),
        ([0, -signal.SIGKILL], 137),
    ],
)
def test_a_failure_of_any_part_fails_the_whole(codes: list[int], expected: int) -> None:
    assert exit_code(codes) == expected


def _run(tests: str, lint: str) -> "subprocess.Popen[str]":
    """Run these Python programs instead of the tests and lint."""
    words = [[sys.executable, "-c", program] for program in (tests, lint)]
    program = f"import sys\nfrom tests.support.suite import run\nsys.exit(run(*{words!r}))"
    command = [sys.executable, "-P", "-c", program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_output_of_lint_is_printed_whole_at_its_end() -> None:
    process = _run("print('live')", "import sys; print('first'); sys.exit('a mistake')")
    out, _ = process.communicate()
    assert process.returncode == 1
    assert "live\n" in out
    whole = out[out.index("===== lint: ") :]
    assert whole.splitlines()[1:3] in (["first", "a mistake"], ["a mistake", "first"])
    assert "===== lint: exit code 1\n" in whole


def test_a_sigterm_ends_both(tmp_path: Path) -> None:
    begin = f"import pathlib, signal\nready = pathlib.Path({str(tmp_path / 'ready')!r})\n"
    tests = f"{begin}while not ready.exists(): pass\nprint(1, flush=True); signal.pause()"
    process = _run(tests, f"{begin}ready.touch(); signal.pause()")
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    process.stdout.close()
