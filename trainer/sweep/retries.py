"""Which trials are trained again, and where. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainbox.contract.errors import ExitCode
from trainer.sweep.trials import Trial

# The same bits would fail in the same way.
_NEVER_RETRIED = (ExitCode.WRONG_USE, ExitCode.NOT_FINITE)


@dataclass(frozen=True)
class TrialLimits:
    """The number of retries of a failed trial, and the longest time of one attempt."""

    retries: int = 1
    trial_minutes: float | None = None


@dataclass(frozen=True)
class Waiting:
    """A trial that this machine trains again at `from_s` or later.

    `visible` is the GPU on which it failed, or None if it did not fail.
    """

    trial: Trial
    visible: str | None
    from_s: float


def is_retried(trial: Trial, code: int, limits: TrialLimits) -> bool:
    """Return whether a trial that has failed with this exit code is trained again."""
    return code not in _NEVER_RETRIED and trial.attempts < limits.retries


def due(waiting: Sequence[Waiting], visible: str, now_s: float) -> list[Waiting]:
    """Return the trials that may start now. Those that failed on the GPU `visible` come last."""
    ready = [entry for entry in waiting if entry.from_s <= now_s]
    return sorted(ready, key=lambda entry: entry.visible == visible)
