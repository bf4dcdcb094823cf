"""How a sweep draws the settings of a trial with Optuna."""

import math
from collections.abc import Mapping

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
    """Return the sampler that draws the settings of the sweep's trials, if it is not a grid."""
    # Without a seed: each process that shares the study must draw different numbers.
    return TPESampler() if sweep.sampler == "tpe" else RandomSampler()


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


def draw(
    study: optuna.Study, trial: FrozenTrial, space: Mapping[str, BaseDistribution]
) -> dict[str, Value]:
    """Draw the settings of a trial from `space`: numbers that are easy to read and type.

    A combination that the study already has would only repeat a trial. So it is drawn again, by the
    sampler of the study and then uniformly.
    """
    known = [other.params for other in study.get_trials(deepcopy=False)]
    point: dict[str, Value] = {}
    for sampler in [study.sampler] * _TRIES + [RandomSampler()] * _UNIFORM_TRIES:
        point = {
            name: rounded(sampler.sample_independent(study, trial, name, drawn), drawn)
            for name, drawn in space.items()
        }
        if point not in known:
            break
    return point


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
