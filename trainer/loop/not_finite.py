"""The error for a loss or a gradient that is infinite or NaN, and its cause in the data."""

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from trainbox.contract.errors import ExitCode, Failure
from trainer.data.examples import SeededExamples
from trainer.data.nested import tensors_in
from trainer.loop.state import Job

_SEARCH_S = 10.0


def not_finite(job: Job, what: str) -> Failure:
    """Return the error for `what`, which is infinite or NaN; all ranks must call this."""
    progress = job.state.progress
    found = next((n for n in job.world.from_each(_bad_example(job)) if n is not None), None)
    remedy = (
        "lower --lr, add --warmup-epochs or --clip-norm, or use --precision fp32"
        if found is None
        else f"example {found} of the training set has a number that is infinite or NaN: repair it"
    )
    best = f" (best: step {progress.best_step})" if progress.best_step else ""
    # The checkpoint of the best step may not be complete yet.
    saved = progress.best_step or job.world.from_first(job.run.folder.has_had_a_checkpoint())
    valid = f"; earlier checkpoints are valid{best}" if saved else ""
    return Failure(
        f"{what} is not finite by step {progress.step}: {remedy}{valid}",
        exit_code=ExitCode.NOT_FINITE,
    )


def check_running(job: Job, running: Mapping[str, Sequence[float]]) -> None:
    """Check the sums of the losses since the last log entry; all ranks must call this.

    Raises:
        Failure: A loss is infinite or NaN. A metric may be.
    """
    for name, sums in running.items():
        if name not in job.task.train_metrics and not all(map(math.isfinite, sums)):
            raise not_finite(job, f"loss {name!r}")


def _bad_example(job: Job) -> int | None:
    """Return the first example since the last log entry with such a number, or None."""
    steps = max(job.state.running.steps, job.state.progress.skipped_in_a_row)
    indices = job.schedule.indices(job.state.progress.step - steps)
    examples, until_s = SeededExamples(job.train, job.schedule.seed), time.monotonic() + _SEARCH_S
    for _ in range(steps * len(job.schedule.micros)):
        epoch, micro = next(indices)
        for index in map(int, micro):
            example = (
                tuple(tensor[index] for tensor in job.train.tensors)
                if isinstance(job.train, TensorDataset)
                else examples[(epoch, index)]
            )
            if not all(map(_is_finite, tensors_in(example))):
                return index
            if time.monotonic() > until_s:  # such as large pictures
                return None
    return None


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
