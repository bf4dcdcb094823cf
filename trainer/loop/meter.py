"""Measure the speed, the waits and the memory of a training for `trainbox bench`."""

import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from trainer.loop.state import Job

_FEWEST_STEPS = 5  # of the warm-up and of the measurement
_WARM_UP_SHARE = 0.2  # seconds of warm-up per measured second
_CONTINUE, _BEGIN, _END = "continue", "begin", "end"


class Meter:
    """A measurement that ends the training of `job` after a warm-up and `seconds` of steps.

    Waiting for all ranks and for the GPU costs time. The meter therefore waits only at a few steps,
    at growing distances.
    """

    def __init__(self, job: Job, seconds: float) -> None:
        self._job, self._seconds = job, seconds
        self._cuda = job.world.device.type == "cuda"
        self._micro = 0
        self._decide_at = 1  # step
        self._warm_since: float | None = None
        self._begin: tuple[int, float] | None = None
        self._end: tuple[int, float] | None = None
        self._data_s = self._exchange_before_s = 0.0
        job.around_batches = self._timed_batches

    def _timed_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches, and add up the time until each is ready.

        On a GPU this is the time of the host, which may be ahead of the GPU.
        """
        while True:
            step, micro = divmod(self._micro, len(self._job.schedule.micros))
            if micro == 0:
                self._step_begins(step)
            begin = time.perf_counter()
            batch = next(batches)
            self._data_s += time.perf_counter() - begin
            self._micro += 1
            yield batch

    def _step_begins(self, step: int) -> None:
        """Let rank 0 decide how the measurement continues, if a decision is due at `step`."""
        if step != self._decide_at or self._end is not None:
            return
        now = self._now()
        phase, steps = self._job.world.from_first(list(self._decide(step, now)))
        self._decide_at = step + steps
        if phase == _BEGIN:
            self._energy_before_j = self._job.gpus.joules()
            self._data_s, self._exchange_before_s = 0.0, self._job.reduction.exchange_time.seconds()
            self._begin = (step, self._now())
        elif phase == _END:
            self._end, self._energy_j = (step, now), self._job.gpus.joules()
            self._waited = [
                self._data_s,
                self._job.reduction.exchange_time.seconds() - self._exchange_before_s,
            ]
            # The training ends with this step, which is not measured. The work at the end of a
            # training, such as a checkpoint, is not part of a step.
            self._job.end_step = step + 1

    def _decide(self, step: int, now: float) -> tuple[str, int]:
        """Return what to do at `step`, and after how many steps to decide again."""
        if self._begin is None:
            if self._warm_since is None:
                self._warm_since = now
            warm_s = now - self._warm_since
            warm = step >= _FEWEST_STEPS and warm_s >= self._seconds * _WARM_UP_SHARE
            return (_BEGIN, _FEWEST_STEPS) if warm else (_CONTINUE, step)
        done, passed_s = step - self._begin[0], now - self._begin[1]
        left_s = self._seconds - passed_s
        if left_s <= 0:
            return _END, 0
        return _CONTINUE, max(1, min(done, math.ceil(left_s * done / passed_s)))

    def _now(self) -> float:
        """Return the time in seconds, when the GPU has finished its work."""
        if self._cuda:
            torch.cuda.synchronize(self._job.world.device)
        return time.perf_counter()

    def write(self) -> None:
        """Write the measurements to measured.json in the run's folder. All ranks must call this."""
        assert self._begin is not None and self._end is not None
        world, config, schedule = self._job.world, self._job.config, self._job.schedule
        (first_step, begin), (last_step, end) = self._begin, self._end
        own = torch.tensor([self._waited], dtype=torch.float64)
        rows = world.gather_rows(own, [1] * world.world_size).tolist()
        steps, seconds = last_step - first_step, end - begin
        measured = {
            "samples_per_second": steps * schedule.batch_size / seconds,
            "steps": steps,
            "seconds": seconds,
            "data_seconds": [row[0] for row in rows],
            # A single process exchanges nothing. DataParallel exchanges within forward and
            # backward, where the exchange cannot be measured.
            "exchange_seconds": [row[1] for row in rows] if world.world_size > 1 else None,
            "memory_mib": self._job.strategy.peak_memory_mib(),
            "energy_joules": None
            if self._energy_j is None or self._energy_before_j is None
            else self._energy_j - self._energy_before_j,
            "device": world.device.type,
            "batch_size": schedule.batch_size,
            "accumulation": config.accumulation,
            "workers": self._job.workers,
            "threads": config.threads,
            "precision": config.precision,
            "examples": schedule.examples,
        }
        self._job.run.folder.write_json("measured.json", measured)
