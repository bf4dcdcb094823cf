"""The errors of the launch decision, each with the exit code that it ends in
(docs/exit-codes.md).
"""

WRONG_USE = 2
HARDWARE = 3
STORAGE = 4
BITS_DIFFER = 8
PREEMPTED = 75


class LaunchError(Exception):
    """A launch that cannot be: the message says what was asked, what was found and what to do."""

    exit_code: int


class WrongUse(LaunchError):
    """Contradictory or malformed request: nobody should retry it."""

    exit_code = WRONG_USE


class HardwareMissing(LaunchError):
    """Fewer GPUs than asked for, or a driver that does not answer: another node may do."""

    exit_code = HARDWARE


class HardwareUnfit(LaunchError):
    """A GPU that should not be trained on: another node may do."""

    exit_code = HARDWARE


class NoPlace(LaunchError):
    """Nothing can be written where it has to be."""

    exit_code = STORAGE


class BitsDiffer(LaunchError):
    """Trainings that should end with the same bits did not."""

    exit_code = BITS_DIFFER


class DrillFailed(LaunchError):
    """One of the drill's trainings ended by an error, with whose code the drill ends."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = code
