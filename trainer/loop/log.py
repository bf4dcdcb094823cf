"""Log mean losses and speed, and warn of a loss spike, a slow network and slow data."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from trainer.data.batches import TimedBatches
from trainer.loop.losses import not_finite
from trainer.loop.state import Job

_SPIKE = 10.0  # a loss that is this many times the median of the recent entries
_RECENT_ENTRIES = 20
_FEW_ENTRIES = 5  # the fewest recent entries for a median
# The network or the data are slow if they take this share of the time for this many seconds.
_SLOW_NETWORK, _SLOW_DATA, _SLOW_FOR_S = 0.5, 0.3, 10.0


@dataclass
class _SlowPart:
    """A part of the step that a training warns of once, if it is slow in several entries in a row.

    Attributes:
        limit: The share of the time from which the part is slow.
        slow_s: How long it has been slow.
    """

    limit: float
    name: str
    remedy: str
    slow_s: float = 0.0
    has_warned: bool = False

    def add(self, job: Job, share: float, steps: int, seconds: float) -> None:
        """Add an entry of `steps` and `seconds`, and warn if the part is slow for long enough."""
        self.slow_s = self.slow_s + seconds if share >= self.limit else 0.0
        if self.has_warned or self.slow_s < _SLOW_FOR_S:
            return
        self.has_warned = True
        job.run.report(
            f"step {job.state.progress.step}: {self.name} takes {share:.0%} of the time "
            f"({share * seconds / steps * 1000:,.0f} ms a step), {self.remedy}"
        )


class TrainingLog:
    """The entries of one training, and the recent values that the warnings compare with."""

    def __init__(self, job: Job, batches: TimedBatches) -> None:
        """Log the training of `job`, which waits for `batches`."""
        self._job, self._batches = job, batches
        self._recent_losses: deque[float] = deque(maxlen=_RECENT_ENTRIES)
        self._totals_s: list[float] | None = None  # of the parts, up to the last entry
        self._metrics: tuple[int, dict[str, float]] = (0, {})  # of the last entry, with its step
        self._network = _SlowPart(
            _SLOW_NETWORK,
            "the exchange of gradients",
            "because the network is slow for this model: use one machine, or a larger --batch-size "
            "to exchange less often",
        )
        self._data = _SlowPart(
            _SLOW_DATA,
            "waiting for data",
            f"with {job.workers} loader worker(s) a process: raise --workers, make __getitem__ "
            "faster, or hold the dataset in memory as a TensorDataset",
        )

    def write(self, norm: Tensor) -> None:
        """Write an entry with the gradient's `norm`; all ranks must call this.

        Nothing is written if each step since the last entry was skipped.

        Raises:
            Failure: A loss or the gradient is infinite or NaN.
        """
        job, progress = self._job, self._job.state.progress
        if not job.state.running.steps:
            return
        # Compute the mean losses and metrics since the last entry. Fail if a loss is not finite.
        losses = job.state.running.means(job.schedule.batch_size)
        metrics = {name: losses.pop(name) for name in job.task.train_metrics}
        self._metrics = (progress.step, metrics)
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
        data, exchange = self._shares(seconds)
        values = {
            "loss": sum(losses.values()),
            **(
                {f"loss_{name}": value for name, value in losses.items()} if len(losses) > 1 else {}
            ),
            **metrics,
            "learning_rate": job.state.optimizer.param_groups[0]["lr"],
            "gradient_norm": float(norm),
            **({"skipped_steps": progress.skipped} if progress.skipped else {}),
            "samples_per_second": speed,
            **({"data_share": statistics.fmean(data)} if data else {}),
            **({"exchange_share": statistics.fmean(exchange)} if exchange else {}),
            **job.gpus.figures(),
        }
        remaining_s = (job.schedule.total_steps - progress.step) * job.schedule.batch_size / speed
        position = f"step {progress.step}/{job.schedule.total_steps}, epoch {epoch}"
        job.run.record(
            "train",
            progress.step,
            epoch,
            values,
            ", ".join([position, f"loss {values['loss']:.4f}", *_shown(metrics)]),
            f", {speed:,.0f} samples/s, {remaining_s:.0f} s to go",
        )
        # Warn of a loss spike, a slow network and slow data, and start the next means.
        self._warn_of_a_spike(values["loss"])
        self._warn_of_slow_parts(data, exchange, steps, seconds)
        job.state.running.clear()

    def line_at(self, step: int) -> str:
        """Return the metrics of the entry at `step` as a text, or "" if it has none."""
        entry_step, metrics = self._metrics
        return f"training {', '.join(_shown(metrics))}" if metrics and entry_step == step else ""

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

    def _shares(self, seconds: float) -> tuple[list[float], list[float]]:
        """Return for each rank the shares of `seconds` for waiting for data and for the exchange.

        The exchange counts only while the rank waits for it, and not while it overlaps a backward.
        Both lists are empty for the first entry, whose time includes the connections and the start
        of loader workers. The second list is empty for a single rank, and for a strategy whose
        forwards communicate.
        """
        job = self._job
        exchanges = job.world.world_size > 1 and not job.strategy.forward_is_collective
        totals_s = [self._batches.seconds]
        if exchanges:
            totals_s.append(job.reduction.exchange_time.seconds())
        before_s, self._totals_s = self._totals_s, totals_s
        if before_s is None:
            return [], []
        own = [(now - before) / seconds for now, before in zip(totals_s, before_s, strict=True)]
        rows = job.world.gather_rows(torch.tensor([own]))
        data, *exchange = rows.T.tolist()
        return data, exchange[0] if exchanges else []

    def _warn_of_slow_parts(
        self, data: list[float], exchange: list[float], steps: int, seconds: float
    ) -> None:
        """Warn once of a slow network, and once of slow data, by their shares on each rank."""
        # If one rank computes slowly, the others wait for it in the exchange, but this rank itself
        # does not wait. If the network is slow, all ranks wait.
        if exchange and self._job.world.nnodes > 1:
            self._network.add(self._job, min(exchange), steps, seconds)
        # If one rank waits for data, the others wait for it in the exchange.
        if data and not isinstance(self._job.train, TensorDataset):
            self._data.add(self._job, max(data), steps, seconds)


def _shown(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in metrics.items()]
