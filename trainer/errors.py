"""The failures that a user can see, each with its exit code (docs/reference/exit-codes.md)."""

import traceback

# The variable with the folder for the last message of each rank, one file per rank.
MESSAGES = "TRAINBOX_MESSAGES"
STORE = "TRAINBOX_STORE"  # the variable with the file through which a machine's ranks connect


class Failure(Exception):
    """An expected failure, whose message says what is wrong and how to fix it."""

    exit_code = 1


class TrialsFailed(Failure):
    """A sweep in which some trials failed. The other trials are recorded."""


class WrongUse(Failure):
    exit_code = 2


class TaskError(WrongUse):
    """An exception in the code of a task, which a single trial or a single GPU may have caused."""


class Busy(WrongUse):
    """A run's folder in which another process trains."""


class Changed(WrongUse):
    """A change since the run's start that may change the bits."""


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
    """A difference between two runs that should have the same bits."""

    exit_code = 8


class Preempted(Failure):
    """A stop by a signal after a checkpoint was saved, from which the same command resumes."""

    exit_code = 75


def called_exit(end: SystemExit) -> Failure:
    """Return the failure for a call of `sys.exit` in a task.

    With the exit code of the task, the training might appear to have succeeded.
    """
    frames = traceback.extract_tb(end.__traceback__)
    place = (
        f" in {frames[-1].name} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    )
    return Failure(
        f"the task called sys.exit({'' if end.code is None else repr(end.code)}){place}: "
        "raise an error instead"
    )
