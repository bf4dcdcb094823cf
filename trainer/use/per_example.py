"""What an evaluation knows of each example: predictions, and intervals of the metrics."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainbox.classification import Classification, counts_by_class
from trainbox.errors import WrongUse
from trainbox.files.entries import csv_text, plain
from trainbox.task import Task
from trainbox.tensor_trees import take, tensors_in
from trainer.data.batches import evaluation_batch_count
from trainer.loop.state import Inference
from trainer.loop.task_checks import (
    check_defines,
    check_same,
    checked_predictions,
    checked_statistics,
    metrics_of,
)

RESAMPLES, LEVEL = 1000, 0.95
# The most numbers of all examples together, 2 GiB on rank 0.
MOST_NUMBERS = 2**28

Columns = Mapping[str, Sequence[int | float | str]]

# Shape suffixes: B examples of a batch, N examples of a dataset, K columns, R resamples.


class PerExample:
    """The values that `compute` returns for each prepared batch, `{name: (B, ...)}`.

    `evaluate` calls this object in the forward of each batch of this rank.
    """

    def __init__(self, job: Inference, compute: Callable[[Any], dict[str, Tensor]]) -> None:
        self._job, self._compute = job, compute
        self._batches: list[dict[str, Tensor]] = []
        self._too_many = False

    def __call__(self, batch: Any) -> None:
        if self._too_many:
            return
        values = self._compute(batch)
        numbers = sum(value[0].numel() for value in values.values())
        self._too_many = numbers * self._job.evaluation.size > MOST_NUMBERS
        self._batches.append({name: value.detach().cpu() for name, value in values.items()})

    def gathered(self) -> dict[str, Tensor]:
        """Return the values of all examples in their order, (N, ...), or none if they are too many.

        All ranks must call this. Floats become float64, and all other types int64.

        Raises:
            WrongUse: The names or shapes differ between batches.
        """
        world, batches = self._job.world, self._job.evaluation
        if world.from_first(self._too_many):
            return {}
        # Under fsdp, a rank may repeat the last batch.
        count = evaluation_batch_count(batches.size, batches.batch_size)
        own = self._batches[: len(world.owned(count))]
        # Rank 0 has a batch if any rank has one.
        columns = world.from_first(
            own and [[n, list(x.shape[1:]), x.is_floating_point()] for n, x in own[0].items()]
        )
        expected = {name: shape for name, shape, _ in columns}
        shapes = ({name: list(x.shape[1:]) for name, x in values.items()} for values in own)
        check_same(
            self._job.task, "predictions() or statistics()", shapes, expected, "the same columns"
        )
        counts = world.from_each(sum(len(next(iter(values.values()))) for values in own))
        found = {}
        for name, shape, is_float in columns:
            none = torch.zeros(0, *shape, dtype=torch.float64 if is_float else torch.int64)
            values = torch.cat([none, *(each[name].to(none.dtype) for each in own)])
            rows_NK = values.reshape(len(values), torch.Size(shape).numel())
            found[name] = world.gather_rows(rows_NK, counts).reshape(-1, *shape)
        return found


# Predictions.


class Predictions(PerExample):
    """The task's predictions of each example.

    Attributes:
        ids: The `ids` of the dataset, or else the indices of the examples.
    """

    def __init__(self, job: Inference) -> None:
        """Collect the predictions of a task that defines them.

        Raises:
            WrongUse: The task does not, or the dataset does not have an id for each example.
        """
        task = job.task
        check_defines(task, "predictions", " to return {name: tensor (B,)}")
        super().__init__(
            job,
            lambda batch: checked_predictions(
                task, task.predictions(job.model, batch), len(tensors_in(batch)[0])
            ),
        )
        size = job.evaluation.size
        self.ids = [str(name) for name in getattr(job.evaluation.dataset, "ids", range(size))]
        if len(self.ids) != size:
            raise WrongUse(
                f"task {type(task).__name__}: the dataset has {size} examples but "
                f"{len(self.ids)} ids: make `ids` a sequence with one name for each example"
            )

    def __call__(self, batch: Any) -> None:
        """Collect the predictions of a batch, or raise WrongUse if they would be too many."""
        super().__call__(batch)
        if self._too_many:
            raise WrongUse(
                f"task {type(self._job.task).__name__}: predictions() returns more than "
                f"{MOST_NUMBERS:,} numbers for all examples: return fewer columns"
            )


def prediction_columns(
    task: Task, first: str, ids: Sequence[str], values: Mapping[str, Tensor]
) -> Columns:
    """Return the column `first` with the `ids`, and the columns of `values`: (N,) or (N, K).

    For a Classification of K classes, the columns of a (N, K) value have the names of the classes,
    and `truth` and `prediction` (N,) are names of classes. Floats have the 9 digits that identify a
    float32.

    Raises:
        WrongUse: Two columns share a name.
    """
    class_names = task.class_names if isinstance(task, Classification) else ()
    of_classes = {*range(len(class_names))}
    columns: dict[str, Sequence[int | float | str]] = {first: ids}
    for name, value in values.items():
        found = {name: value}
        if value.ndim == 2:
            parts = value.T
            named = class_names if len(class_names) == len(parts) else range(len(parts))
            found = {f"{name}_{label}": part for label, part in zip(named, parts, strict=True)}
        for label, part in found.items():
            if label in columns:
                raise WrongUse(
                    f"task {type(task).__name__}: predictions() gives two columns the name "
                    f"{label!r}: rename one of them"
                )
            numbers = part.tolist()
            if part.is_floating_point():
                columns[label] = [float(f"{number:.9g}") for number in numbers]
            elif found.keys() <= {"truth", "prediction"} and of_classes.issuperset(numbers):
                columns[label] = [class_names[k] for k in numbers]
            else:
                columns[label] = numbers
    return columns


def csv_rows(columns: Columns) -> str:
    """Return a header and the rows of the columns as CSV."""
    return csv_text([columns, *zip(*columns.values(), strict=True)])


def json_lines(columns: Columns) -> str:
    """Return a JSON object for each row of the columns. NaN and infinity become null."""
    return "".join(
        json.dumps(plain(dict(zip(columns, row, strict=True)))) + "\n"
        for row in zip(*columns.values(), strict=True)
    )


# Intervals.


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
        values = {name: value_B.float() for name, value_B in task.losses(model, batch).items()}
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
    task: Task, statistics: Mapping[str, Tensor], seed: int
) -> dict[str, list[float]]:
    """Return the percentile interval of each metric (Efron and Tibshirani, 1993).

    `statistics` has the values (N, ...) of each example. The metrics are computed from their sums
    over a resample. A metric that is not finite in some resample has no interval.
    """
    if not statistics:
        return {}
    generator = torch.Generator().manual_seed(seed)
    examples = len(next(iter(statistics.values())))
    drawn = (torch.randint(examples, (examples,), generator=generator) for _ in range(RESAMPLES))
    counts = [torch.bincount(drawn_N, minlength=examples) for drawn_N in drawn]
    weights_NR = torch.stack(counts, 1).double()
    # Most statistics are tables of counts, in which an example has one count.
    totals = {"examples": torch.full((RESAMPLES,), float(examples), dtype=torch.float64)}
    for name, values in statistics.items():
        values_KN = values.double().reshape(examples, -1).T.to_sparse()
        totals[name] = (values_KN @ weights_NR).T.reshape(RESAMPLES, *values.shape[1:])
    found = [
        metrics_of(task, {name: each[i] for name, each in totals.items()}) for i in range(RESAMPLES)
    ]
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    intervals = {}
    for name in found[0]:
        values_R = torch.tensor([each[name] for each in found], dtype=torch.float64)
        if values_R.isfinite().all():
            intervals[name] = torch.quantile(values_R, ends).tolist()
    return intervals
