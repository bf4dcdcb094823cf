"""A script that hangs: no rank prints or computes for a time."""

import time
from collections.abc import Callable

_LOOKS = 10  # within the time limit
# A process that waits uses a little time, such as for the threads of its libraries.
_IDLE_SHARE = 0.01


class Hang:
    """Finds a script whose ranks neither print nor use more than 1 % of a CPU."""

    def __init__(
        self, minutes: float, printed: Callable[[], int], cpu_s: Callable[[], float]
    ) -> None:
        """Report a hang after `minutes` without new bytes and CPU seconds."""
        self._limit_s, self._printed, self._cpu_s = minutes * 60, printed, cpu_s
        self._since_s = self._next_s = time.monotonic()
        self._seen = (-1, 0.0)

    def found(self) -> str | None:
        """Return a message if the script hangs."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + self._limit_s / _LOOKS
        printed, cpu_s = self._printed(), self._cpu_s()
        computed_s = abs(cpu_s - self._seen[1])
        if printed != self._seen[0] or computed_s > _IDLE_SHARE * self._limit_s:
            self._seen, self._since_s = (printed, cpu_s), now_s
        if now_s - self._since_s < self._limit_s:
            return None
        return f"the script hangs: no output and no CPU time for {self._limit_s / 60:g} minutes"
