"""What `trainbox bench` reads: speed, waits and memory of a real training, over some seconds of its
steps.
"""

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from trainer.loop.state import Job

_FEWEST_STEPS = 5  # of the warm-up and of what is measured
_WARM_UP_SHARE = 0.2  # of the measured seconds
_GO_ON, _BEGIN, _END = "go on", "begin", "end"


class Meter:
    """Ends the training of `job` after a warm-up and `seconds` of measured steps, as if that were
    its end.

    The processes and the GPU are waited for at few steps, further and further apart; at all others
    it only takes the time.
    """

    def __init__(self, job: Job, seconds: float) -> None:
        self._job, self._seconds = job, seconds
        self._cuda = job.world.device.type == "cuda"
        self._micro = 0
        self._look_at = 1  # step
        self._warm_since: float | None = None
        self._begin: tuple[int, float] | None = None
        self._end: tuple[int, float] | None = None
        self._data_s = self._exchange_before_s = 0.0
        job.around_batches = self._timed_batches

    def _timed_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, and the time until each is there: on a GPU the host's, which may be
        ahead of it.
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
        """At few steps, further and further apart, all processes hear the first one's word on how
        to go on.
        """
        if step != self._look_at or self._end is not None:
            return
        now = self._now()
        phase, steps = self._job.world.from_first(list(self._decide(step, now)))
        self._look_at = step + steps
        if phase == _BEGIN:
            self._data_s, self._exchange_before_s = 0.0, self._job.reduction.exchange_time.seconds()
            self._begin = (step, self._now())
        elif phase == _END:
            self._end = (step, now)
            self._waited = [
                self._data_s,
                self._job.reduction.exchange_time.seconds() - self._exchange_before_s,
            ]
            # what comes after the last step of a training is not a step's
            self._job.until_step = step + 1

    def _decide(self, step: int, now: float) -> tuple[str, int]:
        """What to do from `step` on, and for how many steps."""
        if self._begin is None:
            if self._warm_since is None:
                self._warm_since = now
            warm_s = now - self._warm_since
            warm = step >= _FEWEST_STEPS and warm_s >= self._seconds * _WARM_UP_SHARE
            return (_BEGIN, _FEWEST_STEPS) if warm else (_GO_ON, step)
        done, passed_s = step - self._begin[0], now - self._begin[1]
        left_s = self._seconds - passed_s
        if left_s <= 0:
            return _END, 0
        return _GO_ON, max(1, min(done, math.ceil(left_s * done / passed_s)))

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize(self._job.world.device)
        return time.perf_counter()

    def write(self) -> None:
        """Put what was measured into measured.json of the run's folder; each process must call
        it.
        """
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
            # DataParallel exchanges within forward and backward, where nobody can look; one process
            # has none.
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
        self._job.run.folder.write_json("measured.json", json.dumps(measured, indent=2) + "\n")
