"""Compute the losses of each example in the module that DDP and DataParallel wrap, with checks."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainbox.errors import ExitCode, Failure, WrongUse
from trainbox.task import Task
from trainbox.tensor_trees import tensors_in
from trainer.data.examples import SeededExamples
from trainer.loop.state import Job
from trainer.loop.task_checks import checked

_SEARCH_S = 10.0
T = TypeVar("T")


class LossModule(nn.Module):
    """The task's losses of its model, `{name: (B,)}` in float32, computed in one forward.

    The task's `train_metrics` are among them, without a gradient.

    The losses are computed in the forward, because DDP sees only the wrapped forward, DataParallel
    runs the forward in one thread per GPU, and autocast applies to one thread. There is one value
    per example, because shards may have unequal sizes: the mean of their means is not the mean of
    the batch.
    """

    def __init__(
        self, task: Task, model: nn.Module, device_type: str, autocast_dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.task, self.model, self.device_type, self.autocast_dtype = (
            task,
            model,
            device_type,
            autocast_dtype,
        )

    def inside(self, compute: Callable[[], T]) -> T:
        """Return `compute()`, called in a forward.

        Under --strategy fsdp, the whole weights are available only in a forward.
        """
        return compute()

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the losses of `batch`, `{name: (B,)}`.

        Raises:
            WrongUse: The task did not return a dict of tensors of real numbers.
        """
        batch = self.task.prepare(batch, training=True)
        with autocast(self.device_type, self.autocast_dtype):
            losses_B = checked(self.task, "losses", self.task.losses(self.model, batch))
        return {name: self._float(name, loss_B) for name, loss_B in losses_B.items()}

    def _float(self, name: str, loss_B: Any) -> Tensor:
        """Return `loss_B` in float32, without a gradient if it is a metric."""
        if not isinstance(loss_B, Tensor):
            raise WrongUse(
                f"task {type(self.task).__name__}: loss {name!r} is a {type(loss_B).__name__}: "
                "return a tensor of shape (B,), one value per example"
            )
        if loss_B.is_complex():  # float() would drop the imaginary part
            raise WrongUse(
                f"task {type(self.task).__name__}: loss {name!r} is complex: return real "
                "numbers, such as its abs()"
            )
        return (loss_B.detach() if name in self.task.train_metrics else loss_B).float()


def autocast(
    device_type: str, dtype: torch.dtype | None
) -> contextlib.AbstractContextManager[None]:
    """Return a context with mixed precision of `dtype`, or without it if `dtype` is None."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device_type, dtype)


def check_losses(task: Task, losses: dict[str, Tensor], size: int) -> None:
    """Check the first losses of a task.

    Raises:
        WrongUse: A loss is not of shape (B,) with B = `size`, none of them has a gradient, or one
            of the `train_metrics` is missing.
    """
    for name in task.train_metrics:
        if name not in losses:
            raise WrongUse(
                f"task {type(task).__name__}: losses() did not return {name!r}, which is in "
                "train_metrics: return a tensor of shape (B,) with this name"
            )
    for name, loss in losses.items():
        shape = tuple(loss.shape)
        if shape != (size,):
            # A mean over the second dimension would train to nonsense.
            remedy = (
                f"an output of shape ({size}, 1) met targets of shape ({size},), so squeeze the "
                "output with nn.Flatten(0) or .squeeze(1)"
                if shape == (size, size)
                else "use reduction='none', with an output and targets of the same shape"
                if not shape
                else "average over all dimensions but the first"
            )
            raise WrongUse(
                f"task {type(task).__name__}: loss {name!r} has shape {shape} instead of "
                f"({size},), one value per example: {remedy}"
            )
    if not any(loss.requires_grad for loss in losses.values()):
        names = ", ".join(losses)
        counts = all(loss.unique().tolist() == [0.0, 1.0] for loss in losses.values())
        cure = (
            "argmax() and comparisons have no gradient, so return a loss such as F.cross_entropy, "
            "and name an accuracy in train_metrics"
            if counts
            else f"compute {names} from the model's output without detach() or torch.no_grad()"
        )
        raise WrongUse(
            f"task {type(task).__name__}: no loss depends on a trained parameter: {cure}"
        )


def check_gradients(job: Job) -> None:
    """Note the parameters that get a gradient in a micro-batch of the first steps.

    Raises:
        WrongUse: A gradient is sparse.
    """
    for name, parameter in job.model.named_parameters():
        if parameter.grad is None:
            continue
        job.with_gradient.add(name)
        if parameter.grad.is_sparse:
            raise WrongUse(
                f"task {type(job.task).__name__}: the gradient of {name} is sparse and cannot be "
                "exchanged between processes: use sparse=False"
            )


def note_broken_loss(job: Job, number: int, losses_B: Mapping[str, Tensor]) -> None:
    """Note the first trained loss of the training that is infinite or NaN, and its example.

    The losses are the losses of micro-batch `number` in the first step, before any update.
    """
    for name, loss_B in losses_B.items():
        if job.broken_start or not loss_B.requires_grad or bool(loss_B.isfinite().all()):
            continue
        place = int((~loss_B.isfinite()).nonzero()[0])
        _, micro = next(itertools.islice(job.schedule.indices(0), number, None))
        job.broken_start = f"the loss {name} of example {int(micro[place])} of the training set"


def note_first_gradient(job: Job) -> None:
    """Note the first gradient of the training that is infinite or NaN, or that all are 0.

    All ranks must call this.
    """
    gradients = {n: p.grad for n, p in job.model.named_parameters() if p.grad is not None}
    # Under FSDP, torch asks all ranks about the whole gradient.
    job.starts_at_zero = not any(bool(gradient.any()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        if not bool(gradient.isfinite().all()):
            job.broken_start = job.broken_start or f"the gradient of {name}"
            return


def not_finite(job: Job, what: str) -> Failure:
    """Return the error for `what`, which is infinite or NaN; all ranks must call this."""
    progress = job.state.progress
    found = next((n for n in job.world.from_each(_bad_example(job)) if n is not None), None)
    start = next(filter(None, job.world.from_each(job.broken_start)), "")
    remedy = "lower --lr, add --warmup-epochs or --clip-norm, or use --precision fp32"
    if found is not None:
        remedy = (
            f"example {found} of the training set has a number that is infinite or NaN: repair it"
        )
    elif start and progress.skipped in (0, progress.step):  # later steps have updated the weights
        remedy = (
            f"{start} was so before the first update: check the first weights and the size of the "
            "inputs, and keep 0 out of log(), sqrt() and divisions, as in "
            "values.clamp(min=1e-6).log()"
        )
    best = f" (best: step {progress.best_step})" if progress.best_step else ""
    # The checkpoint of the best step may not be complete yet. A rehearsal removes its checkpoints.
    is_kept = progress.best_step and job.checkpoints.durable
    saved = is_kept or job.world.from_first(job.run.folder.has_had_a_checkpoint())
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
    """Return the first example since the last log entry whose tensors have NaN or infinity.

    Return None if there is none, or if the search takes too long.
    """
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
            if not all(bool(t.isfinite().all()) for t in tensors_in(example)):
                return index
            if time.monotonic() > until_s:  # such as large pictures
                return None
    return None
