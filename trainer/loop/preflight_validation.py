"""A validation of a few batches before the first step: a mistake there must not be found after an
epoch.
"""

import dataclasses
from typing import Any

from torch import Tensor

from trainer.data.batches import EvaluationBatches
from trainer.loop.evaluate import Evaluation, add_up, evaluate
from trainer.loop.out_of_memory import memory_used_up
from trainer.loop.state import Job
from trainer.loop.task_checks import checked_end, checked_metrics
from trainer.loop.validate import compare, draw
from trainer.parallel.world import World
from trainer.records.digest import tensor_digests

# A task that raises one of these does so for any batch. Another error may come from a batch in
# which a class is missing.
_FOR_ANY_BATCH = (AttributeError, ImportError, NameError, NotImplementedError, TypeError)


def try_validation(job: Job) -> list[dict[str, str]]:
    """Validate a sample of the validation set, twice under --deterministic; return digests of the
    statistics of each.

    A task may rightly refuse a sample (a metric that needs two classes, say): what fails there is
    tried with the whole set. Each process computes the sample by itself. If it is not enough for
    one of them, all compute the whole set together: the first process alone draws figures, and the
    others would wait for it until the exchange times out. Nothing is left behind.

    Raises:
        Exception: whatever the first validation would raise.
    """
    sample, digests, enough = job.evaluation.sample(), [], True
    try:
        totals, first_batch, _ = _added_up(job, sample)
        digests.append(_digests(totals))
        if job.config.deterministic:
            digests.append(_digests(_added_up(job, sample)[0]))
        _use(
            job,
            Evaluation(checked_metrics(job.task, job.task.metrics(totals)), totals, first_batch),
        )
    except Exception as error:
        if isinstance(error, _FOR_ANY_BATCH) or memory_used_up(error):
            raise
        enough = False
    if not all(job.world.from_each(enough)):
        job.run.say(
            "a sample of the validation set is not enough to try the validation: all of it "
            "is computed now"
        )
        _use(job, _whole(job))
    return digests


def _added_up(
    job: Job, batches: EvaluationBatches
) -> tuple[dict[str, Tensor], Any, dict[str, Tensor]]:
    found = add_up(
        job.task,
        job.state.model,
        batches,
        _alone(job),
        job.autocast_dtype,
        _seed_parts(job),
        lambda: False,
        job.inside,
    )
    assert found is not None  # nobody stops it
    return found


def _whole(job: Job) -> Evaluation:
    result = evaluate(
        job.task,
        job.state.model,
        job.evaluation,
        job.world,
        job.autocast_dtype,
        _seed_parts(job),
        lambda: False,
        job.inside,
    )
    assert result is not None  # nobody stops it
    return result


def _use(job: Job, result: Evaluation) -> None:
    """Do with `result` what a validation does with it, but for writing it down."""
    checked_end(job.task, job.task.finished(result.metrics))
    compare(result.metrics, job.config.best_by, "--best-by", None)
    if job.config.early_stopping is not None:
        compare(result.metrics, job.config.early_stopping, "--early-stopping", None)
    if job.run.writes or job.strategy.forward_is_collective:  # as in a validation
        draw(job, result)


def _alone(job: Job) -> World:
    """This process as if it were the only one."""
    return dataclasses.replace(job.world, rank=0, world_size=1)


def _seed_parts(job: Job) -> tuple[int | str, ...]:
    return (job.config.seed, "trial", "validation")


def _digests(totals: dict[str, Tensor]) -> dict[str, str]:
    return {f"the statistic {name}": digest for name, digest in tensor_digests(totals).items()}
