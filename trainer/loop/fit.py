"""The training loop.

Read this file first: `fit` has one optimizer step from the batch to the checkpoint, in order.
"""

import contextlib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from trainer.data.batches import training_batches
from trainer.loop.digests import DigestLog
from trainer.loop.log import TrainingLog, not_finite
from trainer.loop.out_of_memory import FIRST_STEPS, all_fit
from trainer.loop.saving import Saving
from trainer.loop.state import Job
from trainer.loop.task_checks import checked_factor
from trainer.loop.validate import evaluation_due, validate
from trainer.system.signals import StopRequest

# Shape suffixes: B examples of a micro-batch.


def fit(
    job: Job,
    stop: StopRequest,
    validated: Callable[[int, Mapping[str, float]], None] | None = None,
) -> None:
    """Train from the current step of `job.state` to the end of the schedule.

    `validated` is called with the step and the metrics of each validation.

    Raises:
        Preempted: `stop` was requested on a rank, and a checkpoint of this step is saved.
        NotFinite: A loss or a weight is infinite or NaN; no checkpoint has it.
        StorageFailure: A checkpoint or the metrics could not be written.
        DoesNotFit: The memory was used up in the first steps; the job cannot be used again.
    """
    config, world, schedule, state = job.config, job.world, job.schedule, job.state
    progress = state.progress
    first_step = progress.step
    log, digests = TrainingLog(job), DigestLog(job)
    saving = Saving(job, stop, digests)

    # The batches from the current step on. Their order depends only on the seed and the epoch.
    batches = training_batches(job.train, schedule, first_step, world.device, job.workers)
    if job.around_batches is not None:
        batches = job.around_batches(batches)

    # The loss of a step is the sum over its examples divided by the global batch size. The gradient
    # is thus the same for every number of processes and micro-batches.
    weights_B = [
        torch.full((micro.size,), 1 / schedule.batch_size, device=world.device)
        for micro in schedule.micros
    ]

    warmup_steps = round(config.warmup_epochs * schedule.steps_per_epoch)
    digest_steps = config.digest_steps or schedule.steps_per_epoch
    digests.record("resume" if first_step else "start")
    state.watch.start(first_step)
    state.model.train()
    while True:
        # Validate at the end of an epoch. A resume validates first if the last start could not.
        if evaluation_due(job) and not validate(job, saving, validated):
            saving.save_and_stop()
        if progress.step >= job.end_step or progress.ended_early:
            break

        # Set the learning rate of this step.
        factor = checked_factor(
            job.task, job.task.schedule(progress.step, schedule.total_steps, warmup_steps)
        )
        for group in state.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

        # Copy the running statistics if the step may have to be undone.
        before = (
            [buffer.clone() for buffer in _statistics(state.model)] if config.skip_nonfinite else []
        )

        # In the first steps the ranks agree whether the batch fits in memory, so nothing is
        # exchanged before the last backward has ended. Later steps overlap both.
        overlaps = progress.step >= first_step + FIRST_STEPS
        with contextlib.nullcontext() if overlaps else all_fit(job.strategy):
            for micro, weight_B in zip(schedule.micros, weights_B, strict=True):
                # Fetch a micro-batch, and seed its random numbers by what it is.
                batch = next(batches)
                world.seed(config.seed, "forward", progress.step, micro.shard, micro.part)

                # Compute the losses (B,) of each example, and the gradient of their weighted sum.
                with job.reduction.of(micro, overlaps):
                    losses_B = job.loss_module(batch)
                    trained_B = [loss_B for loss_B in losses_B.values() if loss_B.requires_grad]
                    torch.autograd.backward(
                        trained_B, [state.scaler.scale(weight_B)] * len(trained_B)
                    )
                state.running.add(losses_B)

        # Sum the gradients over the shards of all ranks.
        job.reduction.finish()
        state.running.steps += 1
        progress.step += 1

        # Clip the gradient. Its norm costs time, so compute the norm only where it is used.
        logged = 0 in (
            progress.step % config.log_steps,
            progress.step % schedule.steps_per_epoch,
            progress.step - job.end_step,
        )
        norm = _gradient_norm(job) if logged or config.clip_norm or config.skip_nonfinite else None

        # Update the weights. The optimizer may not have all parameters, so clear the model's.
        _update(job, norm, before)
        state.model.zero_grad()

        # Log the losses, and record digests of the weights.
        job.run.advance()
        if logged and norm is not None:
            log.write(norm)
        if progress.step % digest_steps == 0 or progress.step == job.end_step:
            digests.record("step")

        # Save a checkpoint if one is due, and stop if any rank was asked to.
        if progress.step == first_step + 1:
            saving.prepare()
        saving.save_or_stop()
    job.checkpoints.wait()
    progress.train_seconds = state.watch.seconds


def _gradient_norm(job: Job) -> Tensor:
    """Return the norm of the whole gradient, and scale the gradient down to `--clip-norm`."""
    if job.state.scaler.is_enabled():
        job.state.scaler.unscale_(job.state.optimizer)
    if job.config.clip_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(job.state.model.parameters(), job.config.clip_norm)
    else:
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in job.state.model.parameters() if p.grad is not None]
        )
    whole: Tensor = job.strategy.whole(norm)
    return whole


def _update(job: Job, norm: Tensor | None, before: list[Tensor]) -> None:
    """Update the weights, or under --skip-nonfinite undo a step whose gradient is not finite.

    The gradient is the sum over all ranks, so all ranks decide the same. The scaler of fp16 skips
    such steps by itself. `before` has the running statistics from before the step.
    """
    progress, most = job.state.progress, job.config.skip_nonfinite
    if not most or norm is None or job.state.scaler.is_enabled() or math.isfinite(norm):
        job.state.scaler.step(job.state.optimizer)
        job.state.scaler.update()
        progress.skipped_in_a_row = 0
        return
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row > most:
        raise not_finite(job, f"the gradient of {progress.skipped_in_a_row} steps in a row")
    job.state.running.drop_step()
    for buffer, old in zip(_statistics(job.state.model), before, strict=True):
        buffer.copy_(old)
    job.run.say(
        f"step {progress.step}: the gradient is not finite, the step is skipped "
        f"({progress.skipped} so far)"
    )


def _statistics(model: nn.Module) -> list[Tensor]:
    """Return the buffers that one bad batch can corrupt."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]
