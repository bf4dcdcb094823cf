"""The trials of a sweep as values."""

from dataclasses import dataclass, field

from trainer.sweep.grid import Value


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
