"""Bootstrap intervals of metrics: resample the examples of an evaluation with replacement."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainbox.classification import Classification, counts_by_class
from trainbox.task import Task
from trainer.data.nested import take, tensors_in
from trainer.loop.state import Inference
from trainer.loop.task_checks import checked_statistics
from trainer.use.predictions import PerExample

RESAMPLES, LEVEL = 1000, 0.95

# Shape suffixes: B examples of a batch, N examples of a dataset, K classes, R resamples.


def statistics_of(job: Inference) -> PerExample | None:
    """Return the collector of the task's statistics of each example.

    Most statistics are functions of one forward. A task with its own statistics() is called for
    each example alone. This is not possible if each forward communicates, as ranks may have
    different numbers of examples: the result is then None.
    """
    by_batch = counts_by_class(job.task) or type(job.task).statistics is Task.statistics
    if job.strategy.forward_is_collective and not by_batch:
        return None
    return PerExample(job, lambda batch: _statistics(job.task, job.model, batch))


def _statistics(task: Task, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return the statistics of each example of the batch, `{name: (B, ...)}`."""
    if isinstance(task, Classification) and counts_by_class(task):
        inputs, labels_B = batch
        return _of_each((model(inputs).float(), labels_B), lambda example: task.sums(*example))
    if type(task).statistics is Task.statistics:
        losses = task.losses(model, batch)
        values = {name: value_B.float() for name, value_B in losses.items()}
        metrics = {name: values.pop(name) for name in task.train_metrics}
        return {"loss": torch.stack([*values.values()]).sum(0), **metrics}
    return _of_each(
        batch, lambda example: checked_statistics(task, task.statistics(model, example))
    )


def _of_each(batch: Any, compute: Callable[[Any], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return what `compute` returns for each example of the batch alone, `{name: (B, ...)}`."""
    first = tensors_in(batch)[0]
    indices_B = torch.arange(len(first), device=first.device)
    rows = [compute(take(batch, index_1)) for index_1 in indices_B.split(1)]
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
    drawn_RN = torch.randint(examples, (RESAMPLES, examples), generator=generator)
    weights_NR = torch.stack(
        [torch.bincount(drawn_N, minlength=examples) for drawn_N in drawn_RN], 1
    ).double()
    # Most statistics are tables of counts, in which an example has one count.
    totals = {"examples": torch.full((RESAMPLES,), float(examples), dtype=torch.float64)}
    for name, values in statistics.items():
        values_KN = values.double().reshape(examples, -1).T.to_sparse()
        totals[name] = (values_KN @ weights_NR).T.reshape(RESAMPLES, *values.shape[1:])
    found = [metrics({name: each[i] for name, each in totals.items()}) for i in range(RESAMPLES)]
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    intervals = {}
    for name in found[0]:
        values_R = torch.tensor([each[name] for each in found], dtype=torch.float64)
        if values_R.isfinite().all():
            low, high = torch.quantile(values_R, ends).tolist()
            intervals[name] = (low, high)
    return intervals
