"""Find out whether the process that owns a trial is alive, on this machine or on another."""

import os
import time
import uuid
from pathlib import Path
from typing import Any

from trainbox.processes.process_tree import start_ticks

_SILENCE_S = 60.0  # a process of another machine that is silent for this long counts as lost


def own_name() -> str:
    """Return a name for this process, from which other processes can see whether it is alive."""
    space = _pid_space()
    return (
        f"{uuid.uuid4().hex[:8]} {space} {os.getpid()} {start_ticks(os.getpid())}"
        if space
        else uuid.uuid4().hex
    )


def has_ended(owner: str) -> bool:
    """Return whether `owner` ran in this PID namespace and has ended.

    Return False if it may run elsewhere.
    """
    _, *process = owner.split()
    if len(process) != 3:
        return False
    space, pid, ticks = process
    return space == _pid_space() and start_ticks(int(pid)) != ticks


def _pid_space() -> str | None:
    """Return the boot and the PID namespace, in which a process id is unique.

    Return None if they cannot be read, as on systems other than Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    except OSError:
        return None


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
