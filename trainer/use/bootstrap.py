"""Bootstrap intervals of metrics: resample the examples of an evaluation with replacement."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

RESAMPLES, LEVEL = 1000, 0.95

# Shape suffixes: N examples, R resamples, M numbers of the statistics of one example.


def bootstrap_intervals(
    statistics: Mapping[str, Tensor],
    metrics: Callable[[dict[str, Tensor]], Mapping[str, float]],
    seed: int,
) -> dict[str, tuple[float, float]]:
    """Return the percentile interval of each metric (Efron and Tibshirani, 1993).

    `statistics` has the values (N, ...) of each example. `metrics` computes metrics from their sums
    over a resample. A metric that is not finite in some resample has no interval.
    """
    generator = torch.Generator().manual_seed(seed)
    examples = len(next(iter(statistics.values())))
    weights_RN = torch.stack(
        [
            torch.bincount(
                torch.randint(examples, (examples,), generator=generator), minlength=examples
            )
            for _ in range(RESAMPLES)
        ]
    ).double()
    # Most statistics are tables of counts, in which an example has one count.
    totals = {
        name: torch.sparse.mm(
            values.double().reshape(examples, -1).T.to_sparse(), weights_RN.T
        ).T.reshape(RESAMPLES, *values.shape[1:])
        for name, values in statistics.items()
    }
    totals["examples"] = torch.full((RESAMPLES,), float(examples), dtype=torch.float64)
    found = [metrics({name: each[i] for name, each in totals.items()}) for i in range(RESAMPLES)]
    intervals = {}
    for name in found[0]:
        values = torch.tensor([each[name] for each in found], dtype=torch.float64)
        if all(map(math.isfinite, values.tolist())):
            ends = torch.quantile(values, torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2]).double())
            intervals[name] = (float(ends[0]), float(ends[1]))
    return intervals
