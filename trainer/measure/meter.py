"""Measure the speed, the waits and the memory of a training for `trainbox bench`."""

import math
import time
from typing import NamedTuple

import torch

from trainer.loop.state import Job

_FEWEST_STEPS = 5  # of the warm-up and of the measurement
_WARM_UP_SHARE = 0.2  # seconds of warm-up per measured second


class _Reading(NamedTuple):
    """The totals of a training before a step."""

    step: int
    at_s: float
    data_s: float
    exchange_s: float


class Meter:
    """A measurement that ends the training of `job` after a warm-up and `seconds` of steps.

    Waiting for all ranks and for the GPU costs time. The meter therefore waits only at a few steps,
    at growing distances.
    """

    def __init__(self, job: Job, seconds: float) -> None:
        self._job, self._seconds = job, seconds
        self._decide_at = 1  # step
        self._warm_since_s: float | None = None
        self._begin: _Reading | None = None
        self._end: _Reading | None = None
        job.before_step.append(self._before_step)

    def _before_step(self, step: int, data_s: float) -> None:
        """Let rank 0 decide how the measurement continues, if a decision is due at `step`."""
        if step != self._decide_at or self._end is not None:
            return
        job, now_s = self._job, self._now()
        due, steps = job.world.from_first(list(self._decide(step, now_s)))
        self._decide_at = step + steps
        if not due:
            return
        exchange_s = job.reduction.exchange_time.seconds()
        if self._begin is None:
            self._begin = _Reading(step, self._now(), data_s, exchange_s)
        else:
            self._end = _Reading(step, now_s, data_s, exchange_s)
            # The training ends with this step, which is not measured. The work at the end of a
            # training, such as a checkpoint, is not part of a step.
            job.end_step = step + 1

    def _decide(self, step: int, now_s: float) -> tuple[bool, int]:
        """Return whether to begin or to end, and after how many steps to decide again."""
        if self._begin is None:
            if self._warm_since_s is None:
                self._warm_since_s = now_s
            warm_s = now_s - self._warm_since_s
            warm = step >= _FEWEST_STEPS and warm_s >= self._seconds * _WARM_UP_SHARE
            return warm, _FEWEST_STEPS if warm else step
        done, passed_s = step - self._begin.step, now_s - self._begin.at_s
        left_s = self._seconds - passed_s
        if left_s <= 0:
            return True, 0
        return False, max(1, min(done, math.ceil(left_s * done / passed_s)))

    def _now(self) -> float:
        """Return the time in seconds, when the GPU has finished its work."""
        if self._job.world.device.type == "cuda":
            torch.cuda.synchronize(self._job.world.device)
        return time.perf_counter()

    def write(self) -> None:
        """Write the measurements to measured.json in the run's folder. All ranks must call this."""
        begin, end = self._begin, self._end
        assert begin is not None and end is not None
        world, config, schedule = self._job.world, self._job.config, self._job.schedule
        waits = [end.data_s - begin.data_s, end.exchange_s - begin.exchange_s]
        rows = world.gather_rows(torch.tensor([waits], dtype=torch.float64)).tolist()
        steps, seconds = end.step - begin.step, end.at_s - begin.at_s
        measured = {
            "samples_per_second": steps * schedule.batch_size / seconds,
            "steps": steps,
            "seconds": seconds,
            "data_seconds": [row[0] for row in rows],
            # A single process exchanges nothing. DataParallel exchanges within forward and
            # backward, where the exchange cannot be measured.
            "exchange_seconds": [row[1] for row in rows] if world.world_size > 1 else None,
            "memory_mib": self._job.strategy.peak_memory_mib(),
            "device": world.device.type,
            "batch_size": schedule.batch_size,
            "accumulation": config.accumulation,
            "workers": self._job.workers,
            "threads": config.threads,
            "precision": config.precision,
            "examples": schedule.examples,
        }
        self._job.run.folder.write_json("measured.json", measured)
