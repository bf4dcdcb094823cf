"""The trials of a sweep as values, and which of them are trained again, and where. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainbox.contract.errors import ExitCode
from trainer.sweep.grid import Value

# The same bits would fail in the same way.
_NEVER_RETRIED = (ExitCode.WRONG_USE, ExitCode.NOT_FINITE)


@dataclass(frozen=True)
class Trial:
    """A trial that this process has claimed."""

    id: int
    number: int
    point: dict[str, Value]
    seed: int
    attempts: int  # the number of earlier attempts, which failed


@dataclass(frozen=True)
class Record:
    """The state of a trial in the study. `message` is the reason of a failure."""

    number: int
    state: str
    point: dict[str, Value]
    seed: int
    metrics: dict[str, float] = field(default_factory=dict)
    message: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Waiting:
    """A trial that this machine trains again at `from_s` or later.

    `visible` is the GPU on which it failed, or None if it did not fail.
    """

    trial: Trial
    visible: str | None
    from_s: float


def is_retried(trial: Trial, code: int, retries: int) -> bool:
    """Return whether a trial that has failed with this exit code is trained again."""
    return code not in _NEVER_RETRIED and trial.attempts < retries


def due(waiting: Sequence[Waiting], visible: str, now_s: float) -> list[Waiting]:
    """Return the trials that may start now. Those that failed on the GPU `visible` come last."""
    ready = [entry for entry in waiting if entry.from_s <= now_s]
    return sorted(ready, key=lambda entry: entry.visible == visible)
