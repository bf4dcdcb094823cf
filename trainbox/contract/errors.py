"""The failures that a user can see, each with its exit code (docs/reference/exit-codes.md)."""

# The variable with the folder for the last message of each rank, one file per rank.
MESSAGES = "TRAINBOX_MESSAGES"
STORE = "TRAINBOX_STORE"  # the variable with the file through which a machine's ranks connect


class Failure(Exception):
    """An expected failure, whose message names the problem and its remedy."""

    exit_code = 1


class WrongUse(Failure):
    """A mistake of the user in the arguments, the settings, the data or the environment."""

    exit_code = 2


class StorageFailure(Failure):
    """A file or folder of a run that cannot be written or read."""

    exit_code = 4


class TrialsFailed(Failure):
    """A sweep in which some trials failed. The other trials are recorded."""


class TaskError(WrongUse):
    """An exception in the code of a task, which a single trial or a single GPU may have caused."""


class Busy(WrongUse):
    """A run's folder in which another process trains."""


class Changed(WrongUse):
    """A change since the run's start that may change the bits."""


class DeviceMissing(Failure):
    """A requested device that is not available."""

    exit_code = 3


class OutOfMemory(Failure):
    """A batch that does not fit in memory and cannot be split further."""

    exit_code = 5


class NotFinite(Failure):
    """A loss, gradient or weight that is infinite or NaN."""

    exit_code = 6


class NetworkFailure(Failure):
    """A lost or impossible connection to another process or machine."""

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
    return Failure(
        f"the task called sys.exit({'' if end.code is None else repr(end.code)}){_where(end)}: "
        "raise an error instead"
    )


def raised_interrupt(interrupt: KeyboardInterrupt) -> Failure:
    """Return the failure for a KeyboardInterrupt in a task.

    Trainbox handles SIGINT, so Ctrl-C does not raise one.
    """
    return Failure(
        f"the task raised KeyboardInterrupt{_where(interrupt)}: raise another error instead"
    )


def _where(error: BaseException) -> str:
    """Return the function and the line that raised `error`."""
    import traceback  # most commands end without it

    frames = traceback.extract_tb(error.__traceback__)
    return (
        f" in {frames[-1].name} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    )
