"""One entry of the training's log: the mean losses since the last one, speed, and warnings of what
is not as it should be.
"""

import math
import statistics

import torch
from torch import Tensor

from trainer.errors import NotFinite
from trainer.loop.state import Job
from trainer.records.gpu_figures import gpu_figures

_SPIKE = 10.0  # times the median of the entries before
_FEW_ENTRIES = 5  # tell nothing of what is usual
_SLOW_NETWORK, _SLOW_FOR_S = 0.5, 10.0  # the share of the time of entries in a row


def write_entry(job: Job, norm: Tensor) -> None:
    """Write it; `norm` is the gradient's. All processes must call it.

    Raises:
        NotFinite: a loss or the gradient is not.
    """
    progress = job.progress
    if not job.running.steps:
        return  # each step since the last entry was skipped
    losses = job.running.means(job.schedule.batch_size)
    for name, value in losses.items():
        if not math.isfinite(value):
            raise not_finite(job, f"loss {name!r}")
    if job.scaler.is_enabled():
        if job.scaler.get_scale() < 1:  # it is halved by each gradient that is not finite
            raise not_finite(job, "the gradient")
    elif not job.config.skip_nonfinite and not math.isfinite(norm):
        raise not_finite(job, "the gradient")
    epoch = (progress.step - 1) // job.schedule.steps_per_epoch + 1
    steps, seconds = job.watch.lap(progress.step)
    speed = steps * job.schedule.batch_size / seconds
    shares = _exchange_shares(job, seconds)
    values = {
        "loss": sum(losses.values()),
        **({f"loss_{name}": value for name, value in losses.items()} if len(losses) > 1 else {}),
        "learning_rate": job.optimizer.param_groups[0]["lr"],
        "gradient_norm": float(norm),
        **({"skipped_steps": progress.skipped} if progress.skipped else {}),
        "samples_per_second": speed,
        **({"exchange_share": statistics.fmean(shares)} if shares else {}),
        **gpu_figures(job.strategy),
    }
    remaining_s = (job.schedule.total_steps - progress.step) * job.schedule.batch_size / speed
    line = (
        f"step {progress.step}/{job.schedule.total_steps}, epoch {epoch}, loss {values['loss']:.4f}"
    )
    job.run.record(
        "train",
        progress.step,
        epoch,
        values,
        line,
        f", {speed:,.0f} samples/s, {remaining_s:.0f} s to go",
    )
    _warn_of_a_spike(job, values["loss"])
    if shares:
        _warn_of_a_slow_network(job, min(shares), steps, seconds)
    job.running.clear()


def not_finite(job: Job, what: str) -> NotFinite:
    """What is not finite, and what to do."""
    best = f", the best at step {job.progress.best_step}" if job.progress.best_step else ""
    return NotFinite(
        f"{what} is not finite by step {job.progress.step}: lower --lr, add "
        "--warmup-epochs or --clip-norm, or use "
        f"--precision fp32; the checkpoints saved before are whole{best}"
    )


def _warn_of_a_spike(job: Job, loss: float) -> None:
    recent = job.recent_losses
    usual = statistics.median(recent) if len(recent) >= _FEW_ENTRIES else math.inf
    if loss > _SPIKE * usual > 0:
        job.run.say(
            f"step {job.progress.step}: the loss {loss:.4g} is {loss / usual:.0f} times "
            f"the usual {usual:.4g}: "
            "look at the data of these steps; --clip-norm or a lower --lr bears it better"
        )
    recent.append(loss)


def _exchange_shares(job: Job, seconds: float) -> list[float]:
    """Which part of the `seconds` since the last entry the exchange took that no backward hides, on
    each process.

    None of the first entry, since connections are made there, and under --strategy fsdp, where each
    forward exchanges.
    """
    if job.world.world_size == 1 or job.strategy.forward_is_collective:
        return []
    before, job.exchange_seconds = job.exchange_seconds, job.reduction.exchange_time.seconds()
    if before is None:
        return []
    own = torch.tensor([[(job.exchange_seconds - before) / seconds]])
    shares: list[float] = job.world.gather_rows(own, [1] * job.world.world_size).flatten().tolist()
    return shares


def _warn_of_a_slow_network(job: Job, least_share: float, steps: int, seconds: float) -> None:
    """Tell it once.

    A process that is slow itself has a small share, and then it is not the network.
    """
    if least_share < _SLOW_NETWORK or job.world.nnodes == 1:
        job.slow_network_seconds = 0.0
        return
    before = job.slow_network_seconds
    job.slow_network_seconds += seconds
    if before < _SLOW_FOR_S <= job.slow_network_seconds and not job.told_of_network:
        job.told_of_network = True
        job.run.say(
            f"step {job.progress.step}: {least_share:.0%} of the time goes by until the "
            "machines have each other's gradients "
            f"({least_share * seconds / steps * 1000:,.0f} ms a step): the network is slow "
            "for this model; one machine alone "
            "may be faster, and a larger --batch-size exchanges less often"
        )
