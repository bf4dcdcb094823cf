"""The command that runs lint and the tests beside each other."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.suite import Part, exit_code, parts, run


def test_lint_is_run_by_make() -> None:
    tests, lint = parts(["--lint", "tests/faults"])
    assert lint == Part("lint", ("make", "--no-print-directory", "lint"))
    assert tests.live and tests.command[-1] == "tests/faults" and "--lint" not in tests.command


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


def _part(name: str, program: str, live: bool = False) -> Part:
    return Part(name, (sys.executable, "-c", program), live)


def test_the_output_of_a_part_is_printed_whole_at_its_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lint = _part("lint", "import sys; print('first'); sys.exit('a mistake')")
    assert run([_part("tests", "print('live')", live=True), lint]) == 1
    out = capfd.readouterr().out
    assert "live\n" in out
    whole = out[out.index("===== lint: ") :]
    assert whole.splitlines()[1:3] in (["first", "a mistake"], ["a mistake", "first"])
    assert "===== lint: exit code 1\n" in whole


def test_a_sigterm_ends_all_parts(tmp_path: Path) -> None:
    program = (
        "from tests.support.suite import Part, run\nimport sys\n"
        "import os\nwaits = 'import os, signal; os.write(1, bytes([49, 10])); signal.pause()'\n"
        "sys.exit(run([Part(name, (sys.executable, '-c', waits), True) for name in 'ab']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["1\n", "1\n"]
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    process.stdout.close()
