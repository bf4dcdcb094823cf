"""A signal while a command starts: no traceback, and the code of the signal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import clean_environment

# Sends SIGINT when the module is imported that is named first.
_PROGRAM = """
import os, signal, sys
module = sys.argv[1]
class Interrupts:
    def find_spec(name, *_):
        if name == module:
            sys.meta_path.remove(Interrupts)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts)
{start}
"""
_COMMAND = "import trainbox_start; sys.argv[:2] = ['trainbox']; trainbox_start.main()"
_RANK = "from entrypoint.script.rank import main; del sys.argv[1]; main()"


def _ended(
    folder: Path, program: str, module: str, words: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, module, *words],
        cwd=folder,
        env=clean_environment(PYTHONPATH=str(Path(__file__).parents[1])),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGTERM, ("drill", "digits")),
        (signal.SIGUSR2, ("drill", "digits")),
        (signal.SIGXCPU, ("health", "--deep")),
    ],
)
def test_a_signal_of_a_scheduler_ends_a_command_with_one_line(
    tmp_path: Path, number: signal.Signals, words: tuple[str, ...]
) -> None:
    program = _PROGRAM.format(start=_COMMAND).replace("SIGINT", number.name)
    module = "entrypoint.drill.task" if "drill" in words else "entrypoint.health.deep"
    ended = _ended(tmp_path, program, module, words)
    assert ended.returncode == 128 + number
    assert ended.stderr == (
        f"trainbox: stopped by {number.name}, and nothing is lost: start the same command again\n"
    )


@pytest.mark.parametrize(
    ("module", "start", "words"),
    [
        ("site", _COMMAND, ("plan",)),
        ("trainbox.processes.environment", _COMMAND, ("plan",)),
        ("entrypoint.cli.commands", _COMMAND, ("--help",)),
        ("entrypoint.cli.training", _COMMAND, ("train",)),
        ("entrypoint.script.script_run", _COMMAND, ("run", "train.py")),
        ("entrypoint.drill.task", _COMMAND, ("drill", "digits")),
        ("trainbox.processes.slurm", _RANK, ("train.py",)),
    ],
)
def test_ctrl_c_at_the_start_prints_no_traceback(
    tmp_path: Path, module: str, start: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").touch()
    program = _PROGRAM.format(start=start)
    if module == "site":  # at once, after the first line of the command
        program = f"{program.splitlines()[1]}\nimport trainbox_start, signal, os\n"
        program += "os.kill(os.getpid(), signal.SIGINT)\n"
    ended = _ended(tmp_path, program, module, words)
    assert ended.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """As in a background job of a shell."""
    program = "import trainbox_start, signal, sys; sys.exit(signal.getsignal(2) != signal.SIG_IGN)"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[1],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        check=False,
    )
    assert ended.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("words", [("--help",), ("train", "--help-all"), ("--version",)])
def test_a_page_that_cannot_be_written_is_reported_in_one_line(words: tuple[str, ...]) -> None:
    trainbox = Path(sys.executable).with_name("trainbox")
    with Path(os.devnull).with_name("full").open("w") as full:
        ended = subprocess.run(
            [str(trainbox), *words],
            env=clean_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 4
    (line,) = ended.stderr.splitlines()
    assert line.startswith("trainbox: cannot write /dev/stdout: No space left on device")
