"""How a sweep draws the settings of a trial with Optuna."""

import math
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

# Draws of a combination until one is new: by the sampler, then uniformly.
_TRIES, _UNIFORM_TRIES = 10, 1000


def make_sampler(sweep: Sweep) -> BaseSampler:
    """Return the sampler of the sweep. Trials of a grid get their settings by their numbers."""
    if sweep.sampler == "grid":
        return RandomSampler()
    # Without a seed: each process that shares the study must draw different numbers.
    first = TPESampler() if sweep.sampler == "tpe" else RandomSampler()
    return _Drawn(first, distributions(sweep))


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


class _Drawn(BaseSampler):
    """A sampler that draws numbers that are easy to read and type, and no combination twice.

    A combination that the study already has would only repeat a trial, so it is drawn again.
    """

    def __init__(self, first: BaseSampler, space: dict[str, BaseDistribution]) -> None:
        """Draw from `space` by the sampler `first`, and uniformly if that repeats itself."""
        self._space = space
        self._tries = [first] * _TRIES + [RandomSampler()] * _UNIFORM_TRIES

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._space

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Any
    ) -> dict[str, Any]:
        known = [other.params for other in study.get_trials(deepcopy=False)]
        point: dict[str, Any] = {}
        for sampler in self._tries:
            point = {
                name: rounded(sampler.sample_independent(study, trial, name, drawn), drawn)
                for name, drawn in search_space.items()
            }
            if point not in known:
                break
        return point

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Value:
        raise AssertionError(f"{param_name} is drawn with the other settings")


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
