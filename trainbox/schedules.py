"""Compute the factor on the learning rate that a scheduler of torch would have."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

# Trainings use few schedules at a time.
_KEPT = 16


def scheduler_factor(
    scheduler: Callable[..., LRScheduler], at: float | Sequence[float], **options: Any
) -> float:
    """Return the factor on the learning rate that a scheduler of torch has after `at` steps.

    The scheduler is built with `options` for an optimizer whose learning rate is 1. So `max_lr` and
    other learning rates of the options are factors, too. A momentum that a scheduler changes is
    ignored. This is a pure function.

    Args:
        scheduler: A class of `torch.optim.lr_scheduler`.
        at: The number of steps of the scheduler, rounded down, such as the epoch or the step. For
            `ReduceLROnPlateau`, the metric of each validation so far.
    """
    replay = _replay(scheduler, repr(sorted(options.items())))
    if isinstance(at, Sequence):
        return replay.after([*at], options)
    return replay.at(int(at), options)


class _Replay:
    """The factors of a scheduler, from its start to the last number that was asked for."""

    def __init__(self, scheduler: Callable[..., LRScheduler]) -> None:
        self._build = scheduler
        self._values: list[float] = []
        self._factors: list[float] = []

    def at(self, count: int, options: dict[str, Any]) -> float:
        """Return the factor after `count` steps without a metric."""
        if not self._factors:
            self._start(options)
        while len(self._factors) <= count:
            self._scheduler.step()
            self._factors.append(self._now())
        return self._factors[count]

    def after(self, values: list[float], options: dict[str, Any]) -> float:
        """Return the factor after a step with each of the metrics `values`."""
        known = min(len(values), len(self._values))
        if not self._factors or values[:known] != self._values[:known]:
            self._start(options)
        for value in values[len(self._values) :]:
            self._scheduler.step(value)  # type: ignore[arg-type]
            self._values.append(value)
            self._factors.append(self._now())
        return self._factors[len(values)]

    def _start(self, options: dict[str, Any]) -> None:
        self._optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
        self._scheduler = self._build(self._optimizer, **options)
        self._optimizer.step()  # torch warns if the scheduler's first step is before this
        self._values, self._factors = [], [self._now()]

    def _now(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


@lru_cache(_KEPT)
def _replay(scheduler: Callable[..., LRScheduler], _options: str) -> _Replay:
    return _Replay(scheduler)
