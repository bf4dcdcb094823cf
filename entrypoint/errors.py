"""The errors of a launch, each with its exit code (docs/reference/exit-codes.md)."""

from trainbox.contract.errors import ExitCode, Failure


class LaunchError(Failure):
    """An error that ends the launcher with `exit_code`."""


class InvalidRequest(LaunchError):
    """A contradictory or malformed request, which a retry cannot fix."""

    exit_code = ExitCode.WRONG_USE


class HardwareMissing(LaunchError):
    """Fewer GPUs than requested, or a driver that does not answer; another node may work."""

    exit_code = ExitCode.HARDWARE


class HardwareUnfit(LaunchError):
    """A GPU that is not fit for training; another node may work."""

    exit_code = ExitCode.HARDWARE


class NotWritable(LaunchError):
    """A folder that cannot be written to."""

    exit_code = ExitCode.STORAGE


class BitsDiffer(LaunchError):
    """Trainings that should have the same bits differ."""

    exit_code = ExitCode.DIFFERENT


class DrillFailed(LaunchError):
    """A failed training of the drill, with its exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = code
