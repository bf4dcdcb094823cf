"""Compute the factor on the learning rate that a scheduler of torch would have."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainbox.errors import WrongUse

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

    Raises:
        WrongUse: the first argument is no class or function, or the others do not belong to it.
    """
    _check(scheduler, at, options)
    replay = _replay(scheduler, repr(sorted(options.items())))
    if isinstance(at, Sequence):
        return replay.after([*at], options)
    return replay.at(int(at), options)


def _check(scheduler: Any, at: float | Sequence[float], options: dict[str, Any]) -> None:
    is_class = isinstance(scheduler, type)
    if not callable(scheduler) or (is_class and not issubclass(scheduler, LRScheduler)):
        got = scheduler if isinstance(scheduler, str | type) else type(scheduler).__name__
        raise WrongUse(
            f"scheduler_factor got {got!r}, which is no class of a scheduler: give the class and "
            "its options, as in scheduler_factor(StepLR, step, step_size=3)"
        )
    if "optimizer" in options:
        raise WrongUse(
            "scheduler_factor got an optimizer, and has one of its own: drop optimizer=..."
        )
    by_metric = is_class and issubclass(scheduler, ReduceLROnPlateau)
    numbers = at if isinstance(at, Sequence) else [at]
    if by_metric is not isinstance(at, Sequence) or any(isinstance(n, Mapping) for n in numbers):
        name = scheduler.__name__ if is_class else "SCHEDULER"
        second = "[each['loss'] for each in validations]" if by_metric else "step"
        what = "the metric of each validation" if by_metric else "the number of steps"
        raise WrongUse(
            f"scheduler_factor got {type(at).__name__} instead of {what}: write "
            f"scheduler_factor({name}, {second}, ...)"
        )


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
        try:
            self._scheduler = self._build(self._optimizer, **options)
        except (TypeError, ValueError) as error:
            name = getattr(self._build, "__name__", "the scheduler")
            first = str(error).partition("\n")[0]
            cure = "correct its options, which are given by name"
            if "same optimizer" in first:
                cure = (
                    "give a function that builds all schedulers for its argument, as in def "
                    "build(optimizer) at the top of the file and scheduler_factor(build, step)"
                )
            raise WrongUse(f"scheduler_factor cannot build {name} ({first}): {cure}") from error
        self._optimizer.step()  # torch warns if the scheduler's first step is before this
        self._values, self._factors = [], [self._now()]

    def _now(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


@lru_cache(_KEPT)
def _replay(scheduler: Callable[..., LRScheduler], _options: str) -> _Replay:
    return _Replay(scheduler)
