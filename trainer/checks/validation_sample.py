"""Validate a sample, to find mistakes of a validation before the first epoch."""

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from trainbox.classification import counts_by_class, doubtful_outputs
from trainbox.errors import WrongUse, text_of
from trainbox.task import Task
from trainbox.tensor_trees import copied
from trainer.checks.first_forward import new_layers
from trainer.checks.hidden_state import on_any_rank
from trainer.loop.evaluate import Evaluation, add_up, evaluate
from trainer.loop.out_of_memory import all_fit, memory_used_up
from trainer.loop.state import Job
from trainer.loop.task_checks import metrics_of
from trainer.loop.validate import draw, judge
from trainer.records.digest import tensor_digests, value_digest

# A task raises these errors for any batch. Other errors may come from the sample, such as a class
# that is missing from it.
_FOR_ANY_BATCH = (AttributeError, ImportError, NameError, NotImplementedError, TypeError)


class Sample(NamedTuple):
    """The result of a validated sample.

    Attributes:
        digests: The digests of the statistics and the texts of the metrics, by name.
        metrics: The metrics by name.
        totals: The sums from which the metrics are computed.
        share: The number of batches of a whole validation on this rank, divided by the number of
            batches in the sample.
    """

    digests: dict[str, str]
    metrics: dict[str, float]
    totals: dict[str, Tensor]
    share: float


def validate_sample(job: Job, is_first: bool = False) -> Sample | None:
    """Validate a sample as in a validation, write nothing, and return digests of what it computed.

    If it `is_first`, report doubtful outputs of a Classification, and a validation that trains.

    Each rank validates the sample alone. A task may fail with a sample that is too small, for
    example if a metric needs two classes. If it fails on any rank, all ranks validate the whole set
    together, and the result is None. The error may occur on rank 0 alone, for example in figures(),
    but the validation of the whole set is a collective.

    Raises:
        OutOfMemory: The memory of some rank is used up.
        Exception: Any error of the validation.
    """
    # Each rank validates the sample by itself.
    seed_parts = (job.config.seed, "trial", "validation")
    alone = dataclasses.replace(job.world, rank=0, world_size=1)
    sample, problem = None, None
    with _together(job):
        try:
            batches = job.evaluation.sample()
            trains = list[bool]()
            look = [lambda _batch: trains.append(job.model.training)]
            found = add_up(job, batches, alone, seed_parts, lambda: False, look)
            assert found is not None
            totals, first_batch, _ = found
            digests = {f"the statistic {name}": d for name, d in tensor_digests(totals).items()}
            with job.leaves_the_model("metrics()"):
                metrics = metrics_of(job.task, totals)
            digests |= {f"the metric {name}": repr(value) for name, value in metrics.items()}
            _use(job, Evaluation(metrics, totals, first_batch), seed_parts)
            digests["the result of finished()"] = repr(job.state.progress.ended_early)
            share = len(job.evaluation.own) / max(1, len(batches.own))
            sample = Sample(digests, metrics, totals, share)
            if is_first:
                _advise(job, first_batch, any(trains))
        except Exception as error:
            if isinstance(error, _FOR_ANY_BATCH) or memory_used_up(error):
                raise
            problem = f"{type(error).__name__}: {text_of(error)}"
    # If it failed on any rank, all ranks validate the whole set.
    if (problem := on_any_rank(job.world, problem)) is None:
        return sample
    # On several processes, the body of `all_fit` must not exchange statistics.
    with all_fit(job.strategy) if job.world.world_size == 1 else contextlib.nullcontext():
        result = evaluate(job, seed_parts, lambda: False, shown=job.run.console.validation_bar)
    assert result is not None
    with _together(job):
        _use(job, result, seed_parts)
    job.run.report(f"the rehearsal has validated the whole set: a sample is too small ({problem})")
    return None


@contextlib.contextmanager
def _together(job: Job) -> Iterator[None]:
    """Wait until all ranks have run the body, and agree on whether it fitted in memory."""
    with all_fit(job.strategy), job.strategy.wait_for_all("the check of the validation"):
        yield


def _use(job: Job, result: Evaluation, seed_parts: tuple[int | str, ...]) -> None:
    """Use `result` as in a validation, but write nothing."""
    judge(job, result.metrics)
    if job.run.writes or job.strategy.forward_is_collective:  # as in a validation
        drawing = draw(job, result, seed_parts)
        before = _random_numbers()
        drawing()
        if _random_numbers() != before:
            raise WrongUse(
                f"task {type(job.task).__name__}: a function that figures() returned draws random "
                "numbers, which would change the training: draw them in figures()"
            )


def impure_methods(task: Task, sample: Sample) -> list[str]:
    """Return a note for metrics() and finished() if a second call has another result."""
    metrics, totals = sample.metrics, sample.totals
    again = None
    with contextlib.suppress(Exception):  # for example because the first call has reset a metric
        again = metrics_of(task, totals)
    found = [] if repr(again) == repr(metrics) else ["metrics()"]
    with contextlib.suppress(Exception):
        if task.finished(metrics) != task.finished(metrics):
            found.append("finished()")
    return [f"{name} returns something else when it is called again" for name in found]


@torch.no_grad()
def _advise(job: Job, batch: Any, trains: bool) -> None:
    """Report a validation that `trains`, and doubtful outputs of a Classification.

    All ranks must call this.
    """
    if trains:
        job.run.report(
            "statistics() puts the model in training mode, so that a validation drops activations "
            "and changes the statistics of batch norm: remove model.train()"
        )
    if not counts_by_class(job.task):
        return
    with job.evaluating(), new_layers(job.model) as created:
        advice = job.inside(lambda: doubtful_outputs(job.model, copied(batch)))
    if advice and not created:  # a new layer draws its weights, and has a note of its own
        job.run.report(advice)


def _random_numbers() -> str:
    """Return a digest of the states of the global generators of torch, Python and NumPy."""
    return value_digest([torch.get_rng_state(), random.getstate(), numpy.random.get_state()])
