"""Validate a model on each example once, with the same totals on any number of ranks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainbox.task import Task
from trainbox.tensor_trees import copied
from trainer.data.batches import EvaluationBatches, evaluation_batch_count
from trainer.loop.losses import autocast
from trainer.loop.state import Inference
from trainer.loop.task_checks import check_same, checked_statistics, metrics_of
from trainer.parallel.world import World


@dataclass(frozen=True)
class Evaluation:
    """The result of a validation.

    Attributes:
        metrics: The metrics by name.
        totals: The sums from which the metrics are computed (float64, on the CPU).
        first_batch: The first prepared batch, for pictures.
        by_batch: The statistics (N, ...) of all ranks' N batches, in the order of the batches.
    """

    metrics: dict[str, float]
    totals: dict[str, Tensor]
    first_batch: Any
    by_batch: dict[str, Tensor] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, Any]:
        """The metrics, and the totals that are tables, as lists: an entry of metrics.jsonl."""
        tables = {name: total.tolist() for name, total in self.totals.items() if total.ndim}
        return {**self.metrics, **tables}


def evaluate(
    job: Inference,
    seed_parts: tuple[int | str, ...],
    stopped: Callable[[], bool],
    observers: Sequence[Callable[[Any], None]] = (),
    shown: Callable[[Iterable[Any], int], Iterable[Any]] = lambda batches, _count: batches,
) -> Evaluation | None:
    """Return the result of a validation, or None if it was stopped.

    The arguments are passed to `add_up`. All ranks must call this.
    """
    found = add_up(job, job.evaluation, job.world, seed_parts, stopped, observers, shown)
    if found is None:
        return None
    totals, first_batch, by_batch = found
    # All ranks use the metrics of rank 0. If ranks decided by different values, some would wait for
    # the others forever.
    with job.world.wait_for_all("the metrics"), job.leaves_the_model("metrics()"):
        own = metrics_of(job.task, totals)
    metrics = job.world.from_first(own)
    return Evaluation(metrics, totals, first_batch, by_batch)


@torch.no_grad()
def add_up(
    job: Inference,
    batches: EvaluationBatches,
    world: World,
    seed_parts: tuple[int | str, ...],
    stopped: Callable[[], bool],
    observers: Sequence[Callable[[Any], None]] = (),
    shown: Callable[[Iterable[Any], int], Iterable[Any]] = lambda batches, _count: batches,
    statistics: bool = True,
) -> tuple[dict[str, Tensor], Any, dict[str, Tensor]] | None:
    """Add up the task's statistics over the batches of all ranks, in the order of the batches.

    Return the totals, the first prepared batch and the statistics of each batch, or None if the
    validation was stopped.

    Args:
        job: The model and the task.
        batches: This rank's batches.
        world: The ranks whose statistics are added.
        seed_parts: What seeds each batch, together with the number of the batch.
        stopped: Called after each batch that all ranks have; true ends the validation.
        observers: Called with each prepared batch of this rank, inside a forward.
        shown: Gets this rank's batches and their number; returns them with a progress bar.
        statistics: Whether to add the task's statistics, or only the number of examples.

    Raises:
        WrongUse: The shape or the name of a statistic differs between batches, so it cannot be a
            sum over examples.
    """
    task, model = job.task, job.model
    rows: list[dict[str, Tensor]] = []
    first_batch = None
    batch_count = evaluation_batch_count(batches.size, batches.batch_size)
    batches_of_each_rank, counted = batch_count // world.world_size, len(world.owned(batch_count))
    with job.evaluating() as put_back:
        numbered = zip(batches.own, batches.iterate(), strict=True)
        for number, (count, raw_batch) in shown(numbered, len(batches.own)):
            # Each batch begins with the same buffers and random numbers, so its statistics do not
            # depend on the batches that this rank has computed before.
            put_back()
            world.seed(*seed_parts, number)
            batch = task.prepare(raw_batch, training=False)
            # The model may change its inputs in place, so each user but the last gets a copy.
            if first_batch is None:
                first_batch = copied(batch)
            with autocast(world.device.type, job.autocast_dtype):
                sums = {}
                if statistics:
                    given = copied(batch) if observers else batch
                    sums = checked_statistics(
                        task,
                        job.inside(lambda given=given: task.statistics(model, given)),  # type: ignore[misc]
                    )
                for observe in observers:
                    given = copied(batch) if len(observers) > 1 else batch
                    job.inside(lambda given=given, observe=observe: observe(given))  # type: ignore[misc]
            if len(rows) == counted:
                # This rank took part only because the forward needs its share of the weights.
                break
            # `torch.tensor` would copy the number to a GPU, and wait for the copy.
            examples = torch.full((), count, device=world.device)
            rows.append({**sums, "examples": examples})
            if len(rows) <= batches_of_each_rank and stopped():
                return None
    totals, by_batch = _add(task, rows, batch_count, world)
    return totals, first_batch, by_batch


def _add(
    task: Task, rows: list[dict[str, Tensor]], batch_count: int, world: World
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the totals and the statistics of each batch from the rows of all ranks."""
    shapes = world.from_first(
        [[name, list(value.shape)] for name, value in rows[0].items()] if rows else None
    )
    found = ([[name, list(value.shape)] for name, value in row.items()] for row in rows)
    check_same(task, "statistics()", found, shapes, "sums over the examples of the batch")
    # Make each row flat, on the device if it has float64, so that all rows are read at once. Gather
    # the rows (N, K) of all ranks.
    device = torch.device("cpu") if world.device.type == "mps" else world.device
    width = sum(torch.Size(shape).numel() for _, shape in shapes)
    flat = [
        torch.cat([value.detach().reshape(-1).to(device, torch.float64) for value in row.values()])
        for row in rows
    ]
    rows_NK = torch.stack(flat) if flat else torch.zeros(0, width, dtype=torch.float64)
    counts = [len(world.owned_by(rank, batch_count)) for rank in range(world.world_size)]
    all_NK = world.gather_rows(rows_NK, counts)
    # Split the columns into the statistics again.
    widths = [torch.Size(shape).numel() for _, shape in shapes]
    totals = all_NK.sum(0).split(widths)
    by_batch = all_NK.split(widths, 1)
    return (
        {name: part.reshape(shape) for (name, shape), part in zip(shapes, totals, strict=True)},
        {
            name: part.reshape(len(all_NK), *shape)
            for (name, shape), part in zip(shapes, by_batch, strict=True)
        },
    )
