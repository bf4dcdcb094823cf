"""How long a device spends in a part of the step, without holding the step up."""

import contextlib
import time
from collections.abc import Iterator

import torch

_PENDING = 1000  # events are looked at by then


class Elapsed:
    """Adds up the seconds in the bodies of `with elapsed():`, the host's, or on a GPU the GPU's
    own.
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
        """Of all bodies until now; a GPU is waited for until it is done with the last one."""
        if self._pending:
            self._pending[-1][1].synchronize()
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._pending) / 1000
            self._pending.clear()
        return self._seconds
