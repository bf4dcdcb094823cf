"""The exit codes, and the failures that a user can see, each with its code."""

import enum
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traceback import StackSummary


class ExitCode(enum.IntEnum):
    """The exit codes of every command, each with its meaning (docs/reference/exit-codes.md)."""

    SUCCESS = 0, "success"
    UNEXPECTED = 1, "unexpected error, or a failed trial of a sweep"
    WRONG_USE = 2, "wrong use or configuration, or an exception in a task"
    HARDWARE = 3, "missing or unfit GPUs, or a driver that does not answer"
    STORAGE = 4, "storage: no valid checkpoint, a full disk, or no write permission"
    MEMORY = 5, "out of memory, on the GPU or on the host"
    NOT_FINITE = 6, "a loss or a weight that is not finite"
    NETWORK = 7, "rendezvous or network: a missing or lost node, or a rank that hangs"
    DIFFERENT = (
        8,
        "different bits, or contradictory files of a run (`verify`, `drill`, `evaluate`, `export`)",
    )
    PREEMPTED = 75, "preempted, with a checkpoint"

    meaning: str

    def __new__(cls, code: int, meaning: str) -> "ExitCode":
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member


# The code of a stop before anything new was saved, as if the signal had ended the process. After
# PREEMPTED, a scheduler starts a job again without a limit.
UNSAVED = 128 + signal.SIGTERM

# Of a user's script, for `trainbox run`.
STOPPED_ITSELF = (
    "the script exited with code 75 without a signal to stop, so the exit code is 1: use 75 only "
    "after SIGTERM, or start the script again with --restarts N"
)
NOTHING_SAVED = (
    "the script has stopped without a new checkpoint in its run folder, so the exit code is not 75 "
    "(a log, a table or a picture is no checkpoint): save to the folder {run}, or TRAINBOX_RUN"
)


# The signal to a trainer instead of SIGINT. Python prints a traceback for a SIGINT that arrives
# before the handler is installed. No scheduler sends this signal.
INTERRUPT = signal.SIGVTALRM


def asked_by(sent: int) -> int:
    """Return the signal that asked for a stop, given the signal that was `sent` to the trainer."""
    return signal.SIGINT if sent == INTERRUPT else sent


def stopped_without_loss(number: int) -> str:
    """Return the message for a program that the signal `number` has ended before it has saved."""
    name = signal_name(asked_by(number))
    return f"stopped by {name}, and nothing is lost: start the same command again"


def text_of(error: BaseException) -> str:
    """Return `str(error)`, also if the class of a user's error cannot make its text."""
    try:
        return str(error)
    except Exception as failed:  # noqa: BLE001 - of the user's own code
        return f"without a text, because its __str__() raised {type(failed).__name__}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL, or `signal 40` if it does not have one."""
    return signal.Signals(number).name if number in [*signal.Signals] else f"signal {number}"


def shell_code(returncode: int) -> int:
    """Return the exit code for the `returncode` of a child: 128 + N if signal N has ended it."""
    return returncode if returncode >= 0 else 128 - returncode


def signal_of(code: int) -> int | None:
    """Return the signal N of the exit code 128 + N, or None for another exit code."""
    return code - 128 if 128 < code <= 192 else None  # Linux has 64 signals


# What a process may also exit with because another one failed, the least telling code first.
# torchrun ends all other ranks by SIGTERM, at which a script may save and exit with 75. NCCL aborts
# the ranks that lose another rank.
_CONSEQUENCES = (
    ExitCode.SUCCESS,
    UNSAVED,
    ExitCode.PREEMPTED,
    ExitCode.NETWORK,
    128 + signal.SIGABRT,
    ExitCode.UNEXPECTED,
)


def code_of_cause(codes: Iterable[int]) -> int:
    """Return which of the exit codes of several processes of a job shows why the job failed.

    A code that requires manual action outweighs one after which the same command may succeed. The
    script deploy/slurm/run.sh chooses in the same way among the codes of nodes. Without a code, as
    if each process hung and was killed, it is UNEXPECTED.
    """

    def weight(code: int) -> int:
        if code in _CONSEQUENCES:
            return _CONSEQUENCES.index(code)
        may_pass = code == ExitCode.HARDWARE or signal_of(code) is not None
        return len(_CONSEQUENCES) + (not may_pass)

    return max(sorted(codes), key=weight, default=ExitCode.UNEXPECTED)


class Failure(Exception):
    """An expected failure, whose message names the problem and its remedy."""

    exit_code: int = ExitCode.UNEXPECTED

    def __init__(self, *message: object, exit_code: int | None = None) -> None:
        """Use the code of the class, or `exit_code`."""
        super().__init__(*message)
        if exit_code is not None:
            self.exit_code = exit_code


class WrongUse(Failure):
    """A mistake of the user in the arguments, the settings, the data or the environment."""

    exit_code = ExitCode.WRONG_USE


class StorageFailure(Failure):
    """A file or folder that cannot be written or read."""

    exit_code = ExitCode.STORAGE


class Changed(WrongUse):
    """A change since the run's start that may change the bits."""


class DeviceMissing(Failure):
    """A GPU that is missing or unfit, or a driver that does not answer: another node may work."""

    exit_code = ExitCode.HARDWARE


class OutOfMemory(Failure):
    """A batch that does not fit in memory. In the first steps of a start, it is split again."""

    exit_code = ExitCode.MEMORY


class NetworkFailure(Failure):
    """A lost or impossible connection to another process or machine."""

    exit_code = ExitCode.NETWORK


class Stopped(Failure):
    """A stop by a signal before anything new was saved."""

    exit_code = UNSAVED


class Preempted(Stopped):
    """A stop by a signal after a new checkpoint was saved, from which the same command resumes."""

    exit_code = ExitCode.PREEMPTED


def called_exit(end: SystemExit) -> Failure:
    """Return the failure for a call of `sys.exit` in a task.

    With the exit code of the task, the training might appear to have succeeded.
    """
    called = f"the task called sys.exit({'' if end.code is None else repr(end.code)})"
    if any(Path(frame.filename).name == "argparse.py" for frame in _frames(end)):
        return WrongUse(
            f"{called}{_where(end)}: use fields of the task and --set instead of parse_args()"
        )
    return Failure(f"{called}{_where(end)}: raise an error instead")


def raised_interrupt(interrupt: KeyboardInterrupt) -> Failure:
    """Return the failure for a KeyboardInterrupt in a task.

    Trainbox handles SIGINT, so Ctrl-C does not raise one.
    """
    return Failure(
        f"the task raised KeyboardInterrupt{_where(interrupt)}: raise another error instead"
    )


def _where(error: BaseException) -> str:
    """Return the function and the line that raised `error`, outside of Python's own modules."""
    frames = _frames(error)
    library = Path(os.__file__).parent
    own = [
        frame
        for frame in frames
        # exit() is in <frozen _sitebuiltins>.
        if frame.filename[0] != "<" and not Path(frame.filename).is_relative_to(library)
    ] or frames
    return f" in {own[-1].name} ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _frames(error: BaseException) -> "StackSummary":
    import traceback  # most commands end without it

    return traceback.extract_tb(error.__traceback__)
