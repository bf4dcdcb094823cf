"""One optimizer step: from the micro-batches to the new weights."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trainbox.errors import WrongUse
from trainbox.order import derive_seed
from trainer.loop.losses import (
    check_gradients,
    check_losses,
    not_finite,
    note_broken_loss,
    note_first_gradient,
)
from trainer.loop.out_of_memory import FIRST_STEPS, all_fit
from trainer.loop.state import Job
from trainer.loop.task_checks import checked_factor, reads_argument

# Shape suffix: B examples of a micro-batch.

_SEEDED_STEPS = 64  # the seeds of so many steps are computed at once


class EagerStep:
    """The optimizer step of a training.

    It is eager: torch starts each operation alone, and not all of them as a captured CUDA graph.
    """

    def __init__(self, job: Job, micro_batches: Iterator[Any]) -> None:
        """Train `job` on `micro_batches`, this rank's micro-batches from the current step."""
        self._job, self._micro_batches = job, micro_batches
        # A list, because a walk over all modules would take longer than clearing the gradients.
        self.parameters = list(job.state.model.parameters())
        schedule = job.schedule
        self.first_step = job.state.progress.step
        self._seeds = _seeds(job)
        self._modes = _Modes(job.state.model)
        self._on_gpu = job.world.device.type == "cuda"
        # The loss of a step is the sum over its examples divided by the global batch size, so the
        # gradient means the same for every number of processes. Each example has this weight.
        self._weights_B = [
            torch.full((micro.size,), 1 / schedule.batch_size, device=job.world.device)
            for micro in schedule.micros
        ]

    @property
    def overlaps(self) -> bool:
        """Whether the last backward of a step sends gradients before it ends."""
        return True

    def __call__(self, needs_norm: bool) -> Tensor | None:
        """Update the weights once; all ranks must call this.

        Return the norm of the gradient before clipping. The norm takes time, so without
        `needs_norm` it is None, unless the step itself uses it.
        """
        job = self._job
        config, schedule, state = job.config, job.schedule, job.state
        progress = state.progress

        # Each step begins in training mode: a checkpoint does not have the modes of modules.
        self._modes.train()

        # Set the learning rate of this step: the peak of each group times the task's factor.
        _set_learning_rate(job, schedule_factor(job, progress.step), self._on_gpu)

        # Copy the running statistics, as of batch norm, if the step may be undone.
        old_statistics = (
            [buffer.clone() for buffer in _statistics(state.model)] if config.skip_nonfinite else []
        )

        # In the first steps, the ranks agree that the batch fits in memory before they exchange
        # gradients. In later steps, the exchange overlaps with the backward.
        is_first = progress.step < self.first_step + FIRST_STEPS
        overlaps = self.overlaps and not is_first
        with all_fit(job.strategy, config.memory_format) if is_first else contextlib.nullcontext():
            for number, micro in enumerate(schedule.micros):
                # Fetch a micro-batch on the device of this rank, and seed its random numbers.
                batch = next(self._micro_batches)
                job.world.seed_with(next(self._seeds))

                # Compute the losses and the gradient. At the end of a shard, `reduction` adds the
                # shard's gradients to the gradients of this rank's earlier shards.
                with job.reduction.of(micro, overlaps):
                    losses_B = self.compute(number, batch, is_first)

                # Add the losses to the sums of the next log entry.
                state.running.add(losses_B)

        # Sum the gradients over the shards of all ranks. Each parameter gets its sum as `grad`.
        job.reduction.finish()
        if self._is_plain_start():
            note_first_gradient(job)
        state.running.steps += 1
        progress.step += 1

        # Clip the gradient, and update the weights, unless the gradient is not finite and may be
        # skipped. Clear all gradients of the model: the optimizer may not have all parameters.
        norm, updated = self.update(needs_norm)
        if updated:
            progress.skipped_in_a_row = 0
        else:
            _skip(job, old_statistics)
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def _is_plain_start(self) -> bool:
        """Return whether no step has changed the weights yet, and losses are not in fp16.

        The scaler of fp16 makes the first gradients infinite.
        """
        return self._job.state.progress.step == 0 and not self._job.state.scaler.is_enabled()

    def compute(self, number: int, batch: Any, checks: bool) -> dict[str, Tensor]:
        """Add the gradient of the `batch` that is micro-batch `number` of the step.

        Return its losses, `{name: (B,)}`. In the first steps, they are checked.
        """
        # Compute each loss, (B,), and the gradient of the weighted sum of all losses. The scaler
        # of fp16 enlarges the weights, and so the gradient.
        job = self._job
        losses_B: dict[str, Tensor] = job.loss_module(batch)
        if checks:
            check_losses(job.task, losses_B, job.schedule.micros[number].size)
            if self._is_plain_start():
                note_broken_loss(job, number, losses_B)
        trained_B = [loss_B for loss_B in losses_B.values() if loss_B.requires_grad]
        weight_B = job.state.scaler.scale(self._weights_B[number])
        torch.autograd.backward(trained_B, [weight_B] * len(trained_B))
        if checks:
            check_gradients(job)
        return losses_B

    def update(self, needs_norm: bool) -> tuple[Tensor | None, bool]:
        """Clip the gradient and update the weights.

        Return the norm before clipping, or None if nothing needs it, and whether the weights were
        updated.
        """
        config, state = self._job.config, self._job.state
        uses_norm = needs_norm or config.clip_norm or config.skip_nonfinite
        norm = _clipped_norm(self._job) if uses_norm else None
        if not _may_update(self._job, norm):
            return norm, False
        state.scaler.step(state.optimizer)
        state.scaler.update()
        return norm, True


class _Modes:
    """Whether each module of a model is in training mode, which dropout depends on."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._modes: list[bool] = []
        self._children: list[nn.Module | None] = []
        self._has_own = False

    def train(self) -> None:
        """Put the model in training mode, as its own `train` does.

        A call of `train` is slow, so it is left out if all modules are still in training mode. A
        `train` that the user has written may do more than set modes, so each step calls it.
        """
        if not self._has_own and self._modes and self._now() == (self._modes, self._children):
            return
        self._model.train()
        self._modules = list(self._model.modules())
        self._has_own = any(type(module).train is not nn.Module.train for module in self._modules)
        self._modes, self._children = self._now()

    def _now(self) -> tuple[list[bool], list[nn.Module | None]]:
        modes = [module.training for module in self._modules]
        return modes, [child for each in self._modules for child in each._modules.values()]


def _seeds(job: Job) -> Iterator[int]:
    """Yield the seed of each micro-batch of this rank, from the current step.

    The seeds of many steps are computed at once, which is faster: the code stays in the caches.
    """
    for first in itertools.count(job.state.progress.step, _SEEDED_STEPS):
        yield from [
            derive_seed(job.config.seed, "forward", step, micro.shard, micro.part)
            for step in range(first, first + _SEEDED_STEPS)
            for micro in job.schedule.micros
        ]


def schedule_factor(job: Job, step: int) -> float:
    """Return the factor of the task's schedule at `step`, after the validations until now."""
    total, epoch_steps = job.schedule.total_steps, job.schedule.steps_per_epoch
    warmup_steps = round(job.config.warmup_epochs * epoch_steps)
    validations = job.state.progress.validations
    try:
        factor = job.task.schedule(step, total, warmup_steps, step / epoch_steps, validations)
    except (IndexError, KeyError, ValueError) as error:
        if not validations and reads_argument(type(job.task).schedule, 5):
            error.add_note("there is no validation yet")
        elif validations and isinstance(error, KeyError):
            error.add_note(f"validations has {', '.join(validations[-1])}")
        raise
    return checked_factor(job.task, factor)


def _set_learning_rate(job: Job, factor: float, on_gpu: bool) -> None:
    """Set the learning rate of each parameter group to its peak times `factor`.

    Raises:
        WrongUse: The task has added a group, which a resume would not have.
    """
    for group in job.state.optimizer.param_groups:
        try:
            group["lr"] = learning_rate(group["initial_lr"], factor, on_gpu)
        except KeyError:
            raise WrongUse(
                f"task {type(job.task).__name__}: a parameter group was added to the optimizer by "
                f"step {job.state.progress.step}: add all groups in build_optimizer()"
            ) from None


def learning_rate(peak: float, factor: float, on_gpu: bool) -> float:
    """Return `peak` times `factor`, on a GPU rounded to float32.

    A step that is captured as a CUDA graph reads its learning rate from a float32 tensor. With a
    rounded number, the kernels of torch's fused optimizers compute the same bits.
    """
    rate = peak * factor
    return float(numpy.float32(rate)) if on_gpu else rate


def _clipped_norm(job: Job) -> Tensor:
    """Unscale the gradient and clip it to `--clip-norm`. Return its norm before clipping."""
    if job.state.scaler.is_enabled():
        job.state.scaler.unscale_(job.state.optimizer)
    if job.config.clip_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(job.state.model.parameters(), job.config.clip_norm)
    else:
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in job.state.model.parameters() if p.grad is not None]
        )
    # Under FSDP, torch returns a distributed tensor.
    whole: Tensor = job.strategy.whole(norm)
    return whole


def _may_update(job: Job, norm: Tensor | None) -> bool:
    """Return False if --skip-nonfinite undoes the step.

    `norm` is the norm of the sum over all ranks, so all ranks decide the same. Under fp16, the
    scaler decides instead.
    """
    if not job.config.skip_nonfinite or norm is None or job.state.scaler.is_enabled():
        return True
    return math.isfinite(norm)


def _skip(job: Job, old_statistics: list[Tensor]) -> None:
    """Undo a step whose gradient is not finite; put back `old_statistics` from before the step."""
    progress = job.state.progress
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row > job.config.skip_nonfinite:
        raise not_finite(job, f"the gradient of {progress.skipped_in_a_row} steps in a row")
    job.state.running.drop_step()
    for buffer, old in zip(_statistics(job.state.model), old_statistics, strict=True):
        buffer.copy_(old)
    job.run.report(
        f"step {progress.step}: the gradient is not finite, the step is skipped "
        f"({progress.skipped} so far)"
    )


def _statistics(model: nn.Module) -> list[Tensor]:
    """Return the running statistics: the buffers that one bad batch can corrupt."""
    return [
        buffer for buffer in model.buffers() if buffer.is_floating_point() or buffer.is_complex()
    ]
