"""The ends that a user can meet, each with its exit code (docs/exit-codes.md)."""

import traceback

# Names the folder where torchrun's ranks leave their last words, one file a rank.
MESSAGES = "TRAINBOX_MESSAGES"
STORE = "TRAINBOX_STORE"  # names the file by which the ranks of one machine find each other


class Failure(Exception):
    """An end that is no bug of ours: one or two lines say what was asked, what was found and what
    to do.
    """

    exit_code = 1


class TrialsFailed(Failure):
    """Some trials of a sweep ended by an error; the others are recorded."""


class WrongUse(Failure):
    exit_code = 2


class TaskError(WrongUse):
    """An exception in the code of a task. Its cause may be one trial of a sweep, or one GPU."""


class Busy(WrongUse):
    """Another process trains in the run's folder."""


class Changed(WrongUse):
    """What changes bits is not as it was when the run was started."""


class DeviceMissing(Failure):
    exit_code = 3


class StorageFailure(Failure):
    exit_code = 4


class OutOfMemory(Failure):
    exit_code = 5


class NotFinite(Failure):
    exit_code = 6


class NetworkFailure(Failure):
    exit_code = 7


class Differs(Failure):
    """Two runs that should have the same bits have not."""

    exit_code = 8


class Preempted(Failure):
    """Stopped by a signal with a checkpoint saved: the same command goes on from it."""

    exit_code = 75


def called_exit(end: SystemExit) -> Failure:
    """The failure that a task's own `sys.exit` is: with the task's code the training would seem to
    have succeeded.
    """
    frames = traceback.extract_tb(end.__traceback__)
    place = (
        f" in {frames[-1].name} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    )
    return Failure(
        f"the task called sys.exit({'' if end.code is None else repr(end.code)}){place}: "
        "raise an error instead"
    )
