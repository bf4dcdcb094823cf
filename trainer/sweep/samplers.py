"""How a sweep chooses the settings of a trial: in the order of the grid, or drawn by Optuna."""

import math
from collections.abc import Callable
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from trainer.sweep.grid import Range, Sweep, Value


def make_sampler(sweep: Sweep, point: Callable[[FrozenTrial], dict[str, Value]]) -> BaseSampler:
    """Return the sampler of the sweep. `point` returns the grid's combination for a trial."""
    if sweep.sampler == "grid":
        return _InOrder(point)
    # Without a seed: each process that shares the study must draw different numbers.
    return _RoundedTPE() if sweep.sampler == "tpe" else _RoundedRandom()


def distributions(sweep: Sweep) -> dict[str, BaseDistribution]:
    """Return Optuna's distributions of the grid and the ranges."""
    chosen: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(values) for name, values in sweep.grid.items()
    }
    return chosen | {name: _distribution(drawn) for name, drawn in sweep.ranges.items()}


def _distribution(drawn: Range) -> BaseDistribution:
    if isinstance(drawn.low, int) and isinstance(drawn.high, int):
        return IntDistribution(drawn.low, drawn.high, log=drawn.log)
    return FloatDistribution(drawn.low, drawn.high, log=drawn.log)


class _InOrder(BaseSampler):
    """A sampler that gives trial N the Nth combination.

    Optuna's GridSampler draws combinations at random, and gives processes that ask at the same time
    the same combination.
    """

    def __init__(self, point: Callable[[FrozenTrial], dict[str, Value]]) -> None:
        self._point = point

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Any
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Value:
        return self._point(trial)[param_name]


class _Rounded(BaseSampler):
    """A mixin that makes a sampler draw numbers that are easy to read and type."""

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Any
    ) -> dict[str, Any]:
        drawn = super().sample_relative(study, trial, search_space)  # type: ignore[safe-super]
        return {name: rounded(value, search_space[name]) for name, value in drawn.items()}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Value:
        drawn = super().sample_independent(study, trial, param_name, param_distribution)  # type: ignore[safe-super]
        return rounded(drawn, param_distribution)


class _RoundedTPE(_Rounded, TPESampler):
    pass


class _RoundedRandom(_Rounded, RandomSampler):
    pass


def rounded(value: Value, distribution: BaseDistribution) -> Value:
    """Return a drawn number with three significant digits.

    In a narrow range the number has more digits, so that at least a hundred values remain.
    """
    if not isinstance(distribution, FloatDistribution) or not isinstance(value, float):
        return value
    decimals = 3 - math.ceil(math.log10(distribution.high - distribution.low))
    if distribution.log:
        decimals = max(decimals, 2 - math.floor(math.log10(value)))
    return min(max(round(value, decimals), distribution.low), distribution.high)
