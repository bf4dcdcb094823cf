"""The errors of a launch, each with its exit code (docs/reference/exit-codes.md)."""

from trainbox.contract.errors import Failure

WRONG_USE = 2
HARDWARE = 3
STORAGE = 4
BITS_DIFFER = 8
PREEMPTED = 75


class LaunchError(Failure):
    """An error that ends the launcher with `exit_code`."""


class InvalidRequest(LaunchError):
    """A contradictory or malformed request, which a retry cannot fix."""

    exit_code = WRONG_USE


class HardwareMissing(LaunchError):
    """Fewer GPUs than requested, or a driver that does not answer; another node may work."""

    exit_code = HARDWARE


class HardwareUnfit(LaunchError):
    """A GPU that is not fit for training; another node may work."""

    exit_code = HARDWARE


class NotWritable(LaunchError):
    """A folder that cannot be written to."""

    exit_code = STORAGE


class BitsDiffer(LaunchError):
    """Trainings that should have the same bits differ."""

    exit_code = BITS_DIFFER


class DrillFailed(LaunchError):
    """A failed training of the drill, with its exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = code
