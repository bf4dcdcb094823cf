"""Measure the time that a device spends in a part of the step, without delaying the step."""

import contextlib
import time
from collections.abc import Iterator

import torch

_PENDING = 10_000  # the events are read at this number, at the latest


class Elapsed:
    """The sum of the seconds spent in the bodies of `with elapsed():`.

    On a GPU, the GPU measures the time with events. Otherwise, the host's clock is used.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._pending.append((begin, end))
            if len(self._pending) == _PENDING:
                self.seconds()
            return
        since = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - since

    def seconds(self) -> float:
        """Return the seconds of all bodies until now, after the GPU has finished the last one."""
        if self._pending:
            self._pending[-1][1].synchronize()
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._pending) / 1000
            self._pending.clear()
        return self._seconds
