"""Log mean losses and speed, and warn of a loss spike and of a slow network."""

import math
import statistics
from collections import deque

import torch
from torch import Tensor

from trainer.errors import NotFinite
from trainer.loop.state import Job

_SPIKE = 10.0  # a loss that is this many times the median of the recent entries
_RECENT_ENTRIES = 20
_FEW_ENTRIES = 5  # the fewest recent entries for a median
# A network is slow if the exchange takes this share of the time for this many seconds.
_SLOW_NETWORK, _SLOW_FOR_S = 0.5, 10.0


class TrainingLog:
    """The entries of one training, and the recent values that the warnings compare with."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._recent_losses: deque[float] = deque(maxlen=_RECENT_ENTRIES)
        self._exchange_s: float | None = None  # the total up to the last entry
        self._slow_network_s = 0.0  # the time of the last entries in a row with a slow network
        self._warned_of_network = False

    def write(self, norm: Tensor) -> None:
        """Write an entry with the gradient's `norm`; all ranks must call this.

        Nothing is written if each step since the last entry was skipped.

        Raises:
            NotFinite: A loss or the gradient is infinite or NaN.
        """
        job, progress = self._job, self._job.state.progress
        if not job.state.running.steps:
            return
        # Compute the mean losses since the last entry, and fail if a value is not finite.
        losses = job.state.running.means(job.schedule.batch_size)
        for name, value in losses.items():
            if not math.isfinite(value):
                raise not_finite(job, f"loss {name!r}")
        if job.state.scaler.is_enabled():
            # Each gradient that is not finite halves the scale.
            if job.state.scaler.get_scale() < 1:
                raise not_finite(job, "the gradient")
        elif not job.config.skip_nonfinite and not math.isfinite(norm):
            raise not_finite(job, "the gradient")
        # Measure the time since the last entry, and write the entry.
        epoch = (progress.step - 1) // job.schedule.steps_per_epoch + 1
        steps, seconds = job.state.watch.lap(progress.step)
        speed = steps * job.schedule.batch_size / seconds
        shares = self._exchange_shares(seconds)
        values = {
            "loss": sum(losses.values()),
            **(
                {f"loss_{name}": value for name, value in losses.items()} if len(losses) > 1 else {}
            ),
            "learning_rate": job.state.optimizer.param_groups[0]["lr"],
            "gradient_norm": float(norm),
            **({"skipped_steps": progress.skipped} if progress.skipped else {}),
            "samples_per_second": speed,
            **({"exchange_share": statistics.fmean(shares)} if shares else {}),
            **job.gpus.figures(),
        }
        remaining_s = (job.schedule.total_steps - progress.step) * job.schedule.batch_size / speed
        position = f"step {progress.step}/{job.schedule.total_steps}, epoch {epoch}"
        job.run.record(
            "train",
            progress.step,
            epoch,
            values,
            f"{position}, loss {values['loss']:.4f}",
            f", {speed:,.0f} samples/s, {remaining_s:.0f} s to go",
        )
        # Warn of a loss spike and of a slow network, and start the next means.
        self._warn_of_a_spike(values["loss"])
        if shares:
            self._warn_of_a_slow_network(min(shares), steps, seconds)
        job.state.running.clear()

    def _warn_of_a_spike(self, loss: float) -> None:
        recent, job = self._recent_losses, self._job
        usual = statistics.median(recent) if len(recent) >= _FEW_ENTRIES else math.inf
        if loss > _SPIKE * usual > 0:
            job.run.report(
                f"step {job.state.progress.step}: the loss {loss:.4g} is {loss / usual:.0f} times "
                f"the usual {usual:.4g}: check the data of these steps, or use --clip-norm or a "
                "lower --lr"
            )
        recent.append(loss)

    def _exchange_shares(self, seconds: float) -> list[float]:
        """Return for each rank the share of `seconds` that the visible exchange took.

        The part of an exchange that overlaps a backward is not visible. The list is empty for the
        first entry, which includes the time to connect. It is also empty if each forward
        communicates, because that time is not measured.
        """
        job = self._job
        if job.world.world_size == 1 or job.strategy.forward_is_collective:
            return []
        before, self._exchange_s = self._exchange_s, job.reduction.exchange_time.seconds()
        if before is None:
            return []
        own = torch.tensor([[(self._exchange_s - before) / seconds]])
        shares: list[float] = (
            job.world.gather_rows(own, [1] * job.world.world_size).flatten().tolist()
        )
        return shares

    def _warn_of_a_slow_network(self, least_share: float, steps: int, seconds: float) -> None:
        """Warn once if the share of each rank is large.

        `least_share` is the smallest share. If one rank computes slowly, the other ranks wait for
        it, but its own share is small.
        """
        job = self._job
        if least_share < _SLOW_NETWORK or job.world.nnodes == 1:
            self._slow_network_s = 0.0
            return
        before = self._slow_network_s
        self._slow_network_s += seconds
        if before < _SLOW_FOR_S <= self._slow_network_s and not self._warned_of_network:
            self._warned_of_network = True
            job.run.report(
                f"step {job.state.progress.step}: the exchange of gradients takes "
                f"{least_share:.0%} of the time ({least_share * seconds / steps * 1000:,.0f} ms a "
                "step), because the network is slow for this model: use one machine, or a larger "
                "--batch-size to exchange less often"
            )


def not_finite(job: Job, what: str) -> NotFinite:
    """Return the error for a value that is infinite or NaN."""
    best = f" (best: step {job.state.progress.best_step})" if job.state.progress.best_step else ""
    return NotFinite(
        f"{what} is not finite by step {job.state.progress.step}: lower --lr, add "
        "--warmup-epochs or --clip-norm, or use --precision fp32; earlier checkpoints are "
        f"valid{best}"
    )
