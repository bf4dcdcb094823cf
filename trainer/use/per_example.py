"""Values of each example of an evaluation: predictions, and statistics for intervals."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainbox.classification import Classification, counts_by_class
from trainbox.contract.errors import WrongUse
from trainbox.task import Task
from trainer.data.batches import evaluation_batch_count
from trainer.data.nested import take, tensors_in
from trainer.loop.state import Inference
from trainer.loop.task_checks import checked_predictions, checked_statistics

# The most numbers of all examples together, 2 GiB on rank 0.
MOST_NUMBERS = 2**28

# Shape suffixes: B examples of a batch, N examples of a dataset, K columns.


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
        if numbers * self._job.evaluation.size > MOST_NUMBERS:
            self._too_many = True
            return
        self._batches.append({name: value.detach().cpu() for name, value in values.items()})

    def gathered(self) -> dict[str, Tensor] | None:
        """Return the values of all examples in their order, (N, ...), or None if they are too many.

        All ranks must call this. Floats become float64, and all other types int64.
        """
        job, world = self._job, self._job.world
        batches = job.evaluation
        count = evaluation_batch_count(batches.size, batches.batch_size)
        if world.from_first(self._too_many):
            return None
        # Under fsdp, a rank may repeat the last batch.
        own = self._batches[: len(world.owned(count))]
        columns = world.from_first(
            [
                [name, list(value.shape[1:]), value.is_floating_point()]
                for name, value in own[0].items()
            ]
            if own
            else None
        )
        widths = [torch.Size(shape).numel() for _, shape, _ in columns]
        flat = [
            torch.cat([value.double().flatten(1) for value in _columns(batch)], 1) for batch in own
        ]
        rows_NK = torch.cat(flat) if flat else torch.zeros(0, sum(widths), dtype=torch.float64)
        each = [
            min(owned.stop * batches.batch_size, batches.size) - owned.start * batches.batch_size
            if (owned := world.owned_by(rank, count))
            else 0
            for rank in range(world.world_size)
        ]
        all_NK = world.gather_rows(rows_NK, each)
        found = {}
        for (name, shape, is_float), part in zip(columns, all_NK.split(widths, 1), strict=True):
            values = part.reshape(len(all_NK), *shape)
            found[name] = values if is_float else values.long()
        return found


def _columns(batch: dict[str, Tensor]) -> list[Tensor]:
    return [value if value.ndim > 1 else value[:, None] for value in batch.values()]


def example_ids(job: Inference) -> list[str]:
    """Return the `ids` of the dataset, or else the indices of the examples.

    Raises:
        WrongUse: The ids are not one for each example.
    """
    ids = getattr(job.evaluation.dataset, "ids", range(job.evaluation.size))
    if len(ids) != job.evaluation.size:
        raise WrongUse(
            f"task {type(job.task).__name__}: the dataset has {job.evaluation.size} examples but "
            f"{len(ids)} ids: make `ids` a sequence with one name for each example"
        )
    return [str(name) for name in ids]


def predictions_of(job: Inference) -> PerExample:
    """Return the collector of the task's predictions.

    Raises:
        WrongUse: The task does not define them.
    """
    task = job.task
    if type(task).predictions is Task.predictions:
        raise WrongUse(
            f"task {type(task).__name__} has no method predictions(): define it to return "
            "{name: tensor (B,)}"
        )
    return PerExample(
        job,
        lambda batch: checked_predictions(
            task, task.predictions(job.model, batch), len(tensors_in(batch)[0])
        ),
    )


def not_too_many(task: Task, gathered: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the `gathered` predictions, or raise WrongUse if they are None."""
    if gathered is None:
        raise WrongUse(
            f"task {type(task).__name__}: predictions() returns more than {MOST_NUMBERS:,} "
            "numbers for all examples: return fewer columns"
        )
    return gathered


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
