"""Bootstrap intervals of metrics: resample the examples of an evaluation with replacement."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainbox.classification import Classification, counts_by_class
from trainbox.task import Task
from trainer.data.nested import take, tensors_in
from trainer.loop.state import Inference
from trainer.loop.task_checks import checked_statistics
from trainer.use.predictions import MOST_NUMBERS, PerExample

RESAMPLES, LEVEL = 1000, 0.95

# Shape suffixes: B examples of a batch, N examples of a dataset, K classes, R resamples.


def statistics_of(job: Inference) -> PerExample | None:
    """Return the collector of the task's statistics of each example.

    Most statistics are functions of one forward. A task with its own statistics() is called for
    each example alone. This is not possible if each forward communicates, as ranks may have
    different numbers of examples: the result is then None. It is also None if the confusion
    matrices of all examples are too large.
    """
    task = job.task
    if isinstance(task, Classification) and counts_by_class(task):
        if len(task.class_names) ** 2 * job.evaluation.size > MOST_NUMBERS:
            return None
        return PerExample(job, lambda batch: _of_logits(task, job.model(batch[0]), batch[1]))
    if type(task).statistics is Task.statistics:
        return PerExample(job, lambda batch: _loss_and_metrics(task, job.model, batch))
    if job.strategy.forward_is_collective:
        return None
    return PerExample(
        job,
        lambda batch: _stacked(
            [checked_statistics(task, task.statistics(job.model, one)) for one in _examples(batch)]
        ),
    )


def _loss_and_metrics(task: Task, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    values = {name: value_B.float() for name, value_B in task.losses(model, batch).items()}
    metrics = {name: values.pop(name) for name in task.train_metrics}
    first, *others = values.values()
    return {"loss": sum(others, start=first), **metrics}


def _of_logits(task: Classification, logits_BK: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
    logits_BK = logits_BK.float()
    rows = [slice(i, i + 1) for i in range(len(labels_B))]
    return _stacked([task.sums(logits_BK[row], labels_B[row]) for row in rows])


def _examples(batch: Any) -> list[Any]:
    first = tensors_in(batch)[0]
    return [take(batch, torch.tensor([i], device=first.device)) for i in range(len(first))]


def _stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


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
