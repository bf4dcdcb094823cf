"""The training loop.

Read this file first: the body of its loop is one optimizer step, from the batch to the checkpoint.
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

# Shape suffix: B examples of a micro-batch.


def fit(
    job: Job,
    stop: StopRequest,
    validated: Callable[[int, Mapping[str, float]], None] | None = None,
) -> None:
    """Train from the current step of `job.state` to the end of the schedule.

    `validated` is called with the step and the metrics after each validation.

    Raises:
        Preempted: `stop` was requested on a rank, and a checkpoint of this step is saved.
        NotFinite: A loss, a gradient or a weight is infinite or NaN. No checkpoint contains it.
        StorageFailure: A checkpoint or the metrics could not be written.
        DoesNotFit: The first steps of this call do not fit in memory. The caller builds a new job
            with smaller micro-batches.
    """
    config, world, schedule, state = job.config, job.world, job.schedule, job.state
    progress = state.progress
    first_step = progress.step
    log, digests = TrainingLog(job), DigestLog(job)
    saving = Saving(job, stop, digests)

    # Read this rank's micro-batches from the current step. The order of the examples depends only
    # on the seed and the epoch.
    micro_batches = training_batches(job.train, schedule, first_step, world.device, job.workers)
    if job.around_batches is not None:
        micro_batches = job.around_batches(micro_batches)

    # The loss of a step is the sum over its examples divided by the global batch size, so the
    # gradient means the same for every number of processes. Each example has this weight.
    weights_B = [
        torch.full((micro.size,), 1 / schedule.batch_size, device=world.device)
        for micro in schedule.micros
    ]

    # Record the digests of the start, and start the clock.
    warmup_steps = round(config.warmup_epochs * schedule.steps_per_epoch)
    digest_steps = config.digest_steps or schedule.steps_per_epoch
    digests.record("resume" if first_step else "start")
    state.watch.start(first_step)
    state.model.train()
    while True:
        # Validate at the end of an epoch. If a stop is requested meanwhile, save and stop.
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

        # Copy the running statistics, such as those of batch norm, if the step may be undone.
        old_statistics = (
            [buffer.clone() for buffer in _statistics(state.model)] if config.skip_nonfinite else []
        )

        # In the first steps, the ranks agree that the batch fits in memory before they exchange
        # gradients. In later steps, the exchange overlaps with the backward.
        overlaps = progress.step >= first_step + FIRST_STEPS
        with contextlib.nullcontext() if overlaps else all_fit(job.strategy):
            for micro, weight_B in zip(schedule.micros, weights_B, strict=True):
                # Fetch a micro-batch, and seed its random numbers.
                batch = next(micro_batches)
                world.seed(config.seed, "forward", progress.step, micro.shard, micro.part)

                # Compute each loss, (B,), and the gradient of the weighted sum of all losses.
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

        # Clip the gradient. Its norm takes time, so compute it only if it is used.
        logged = (
            progress.step % config.log_steps == 0
            or progress.step % schedule.steps_per_epoch == 0
            or progress.step == job.end_step
        )
        norm = _clipped_norm(job) if logged or config.clip_norm or config.skip_nonfinite else None

        # Update the weights. Clear all gradients of the model, because the optimizer may not have
        # all parameters.
        _update(job, norm, old_statistics)
        state.model.zero_grad()

        # Count the step on the progress bar, log the losses, and record digests of the weights.
        job.run.advance()
        if logged and norm is not None:
            log.write(norm)
        if progress.step % digest_steps == 0 or progress.step == job.end_step:
            digests.record("step")

        # After the first step, the optimizer has its state: reserve the memory for checkpoints.
        if progress.step == first_step + 1:
            saving.prepare()

        # All ranks vote. Save if a checkpoint is due, and stop if any rank was asked to stop.
        saving.save_or_stop()
    job.checkpoints.wait()
    progress.train_seconds = state.watch.seconds


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
    whole: Tensor = job.strategy.whole(norm)
    return whole


def _update(job: Job, norm: Tensor | None, old_statistics: list[Tensor]) -> None:
    """Update the weights, or under --skip-nonfinite undo a step whose gradient is not finite.

    `norm` is the norm of the sum over all ranks, so all ranks decide the same. Under fp16, the
    scaler decides instead. `old_statistics` are the running statistics before the step.
    """
    progress, limit = job.state.progress, job.config.skip_nonfinite
    if not limit or norm is None or job.state.scaler.is_enabled() or math.isfinite(norm):
        job.state.scaler.step(job.state.optimizer)
        job.state.scaler.update()
        progress.skipped_in_a_row = 0
        return
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row > limit:
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
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]
