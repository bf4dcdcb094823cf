"""The command that runs lint and the tests beside each other."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.suite import Part, exit_code, parts, run


def test_each_test_is_selected_by_one_of_two_pytest_processes() -> None:
    cpu_bound, waiting = parts(["-m", "not slow", "tests/faults", "-x"])
    assert (cpu_bound.live, waiting.live) == (True, False)
    for part, mark in ((cpu_bound, "(not slow) and not waits"), (waiting, "(not slow) and waits")):
        assert part.command[-2:] == ("-m", mark)
        assert {"tests/faults", "-x", "--durations=15", "--durations-min=1"} <= set(part.command)


def test_the_last_selection_counts() -> None:
    cpu_bound, waiting = parts(["-m", "not slow", "-m", "slow"])
    assert (cpu_bound.command[-1], waiting.command[-1]) == (
        "(slow) and not waits",
        "(slow) and waits",
    )
    assert [part.command[-1] for part in parts([])] == ["not waits", "waits"]


def test_the_few_fast_tests_that_wait_have_no_workers() -> None:
    workers = [parts(words)[1].command for words in (["-m", "not slow"], ["-m", "slow"], [])]
    assert [command[command.index("--forks") + 1] for command in workers] == ["0", "4", "4"]


def test_each_pytest_process_writes_its_own_report() -> None:
    reports = [part.command[-1] for part in parts(["--junitxml=build/test.xml"])]
    assert reports == ["--junitxml=build/test.xml", "--junitxml=build/test-waits.xml"]


def test_tests_that_wait_are_collected_from_their_files_alone() -> None:
    waiting = parts([])[1].command
    assert "tests/entrypoint/health/test_health.py" in waiting
    assert "tests/test_suite.py" not in parts(["tests/faults"])[1].command
    assert "tests/test_imports.py" not in waiting
    assert "tests/test_imports.py" in parts(["tests/test_imports.py"])[1].command


def test_an_ignored_folder_is_not_named() -> None:
    """pytest does not apply `--ignore` to a file that is named."""
    waiting = parts(["--ignore=tests/faults"])[1].command
    assert not [word for word in waiting if word.startswith("tests/faults")]
    assert "tests/entrypoint/health/test_health.py" in waiting


def test_lint_is_run_by_make() -> None:
    *_, lint = parts(["--lint"])
    assert lint == Part("lint", ("make", "--no-print-directory", "lint"))


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0, 0], 0),
        ([0, 0, 2], 2),
        ([1, 0, 2], 1),
        ([0, 5, 0], 0),
        ([5, 0], 0),
        ([5, 5], 5),
        ([5, 5, 0], 5),
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


def test_the_parts_run_at_the_same_time(tmp_path: Path) -> None:
    """Each of the two waits for the other one, which opens the other end of the FIFO."""
    subprocess.run(["mkfifo", tmp_path / "meet"], check=True)
    parts_ = [_part(mode, f"open({str(tmp_path / 'meet')!r}, {mode!r})") for mode in "rw"]
    assert run(parts_) == 0


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
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    process.stdout.close()


def test_the_tests_keep_their_bytecode(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert run([_part("tests", "import sys; print(sys.dont_write_bytecode)", live=True)]) == 0
    assert capfd.readouterr().out == "False\n"
