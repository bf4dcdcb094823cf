"""Find out whether the process that owns a trial on another machine is alive."""

import time
from typing import Any

_SILENCE_S = 60.0  # a process of another machine that is silent for this long counts as lost


class Heartbeats:
    """The last heartbeat of each owner, and when this machine first saw it.

    Only the clock of this machine is read, so clocks of machines are never compared.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, float]] = {}

    def is_silent(self, owner: str, beats: Any) -> bool:
        """Return whether the number of `beats` of `owner` has not changed for a minute."""
        if owner not in self._seen or self._seen[owner][0] != beats:
            self._seen[owner] = (beats, time.monotonic())
        return time.monotonic() - self._seen[owner][1] > _SILENCE_S
