"""Validate a sample, to find mistakes of a validation before the first epoch."""

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from trainbox.contract.errors import WrongUse
from trainer.data.batches import EvaluationBatches
from trainer.loop.evaluate import Evaluation, add_up, evaluate
from trainer.loop.out_of_memory import all_fit, memory_used_up
from trainer.loop.state import Job
from trainer.loop.task_checks import checked_end, checked_metrics
from trainer.loop.validate import compare, draw
from trainer.parallel.world import World
from trainer.run.digest import tensor_digests, value_digest

# A task raises these errors for any batch. Other errors may come from the sample, such as a class
# that is missing from it.
_FOR_ANY_BATCH = (AttributeError, ImportError, NameError, NotImplementedError, TypeError)


def validate_sample(job: Job) -> dict[str, str] | None:
    """Validate a sample as in a validation, write nothing, and return digests of the statistics.

    Each rank validates the sample alone. A task may refuse a sample that is too small, for example
    if a metric needs two classes. If it fails on any rank, all ranks validate the whole set
    together, and the result is None. They must, because only rank 0 draws figures, and the other
    ranks would wait for it until a timeout.

    Raises:
        OutOfMemory: The memory of some rank is used up.
        Exception: Any error of the validation.
    """
    # Each rank validates the sample by itself.
    digests, sample_suffices = dict[str, str](), True
    with _together(job):
        try:
            totals, first_batch, _ = _totals(job, job.evaluation.sample())
            digests = {f"the statistic {name}": d for name, d in tensor_digests(totals).items()}
            metrics = checked_metrics(job.task, job.task.metrics(totals))
            _use(job, Evaluation(metrics, totals, first_batch))
        except Exception as error:
            if isinstance(error, _FOR_ANY_BATCH) or memory_used_up(error):
                raise
            sample_suffices = False
    # If it failed on any rank, all ranks validate the whole set.
    if all(job.world.from_each(sample_suffices)):
        return digests
    job.run.report(
        "a sample of the validation set is too small for the rehearsal: validating the whole set"
    )
    # On several processes, the body of `all_fit` must not exchange statistics.
    with all_fit(job.strategy) if job.world.world_size == 1 else contextlib.nullcontext():
        result = _of_whole_set(job)
    with _together(job):
        _use(job, result)
    return None


@contextlib.contextmanager
def _together(job: Job) -> Iterator[None]:
    """Wait until all ranks have run the body, and agree on whether it fitted in memory."""
    with all_fit(job.strategy), job.strategy.wait_for_all("the check of the validation"):
        yield


def _totals(
    job: Job, batches: EvaluationBatches
) -> tuple[dict[str, Tensor], Any, dict[str, Tensor]]:
    """Return the totals, the first batch and the statistics of `batches`, for this rank alone."""
    found = add_up(job, batches, _alone(job), _seed_parts(job), lambda: False)
    assert found is not None  # `stopped` is always false
    return found


def _of_whole_set(job: Job) -> Evaluation:
    """Return the result of a validation of the whole set by all ranks."""
    result = evaluate(job, _seed_parts(job), lambda: False)
    assert result is not None  # `stopped` is always false
    return result


def _use(job: Job, result: Evaluation) -> None:
    """Use `result` as in a validation, but write nothing."""
    checked_end(job.task, job.task.finished(result.metrics))
    compare(result.metrics, job.config.best_by, "--best-by", None)
    if job.config.early_stopping is not None:
        compare(result.metrics, job.config.early_stopping, "--early-stopping", None)
    if job.run.writes or job.strategy.forward_is_collective:  # as in a validation
        drawing = draw(job, result, _seed_parts(job))
        before = _random_numbers()
        drawing()
        if _random_numbers() != before:
            raise WrongUse(
                f"task {type(job.task).__name__}: a function that figures() returned draws random "
                "numbers, which would change those of the training: draw them in figures()"
            )


def _random_numbers() -> str:
    """Return a digest of the states of the global generators of torch, Python and NumPy."""
    return value_digest([torch.get_rng_state(), random.getstate(), numpy.random.get_state()])


def _alone(job: Job) -> World:
    """Return a world of this rank alone."""
    return dataclasses.replace(job.world, rank=0, world_size=1)


def _seed_parts(job: Job) -> tuple[int | str, ...]:
    """Return the parts of this check's seed."""
    return (job.config.seed, "trial", "validation")
