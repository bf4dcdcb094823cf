"""Names of processes, from which other processes can see whether they are alive."""

import os
import uuid
from pathlib import Path

from trainbox.processes.process_tree import is_running, start_ticks


def own_name() -> str:
    """Return a name for this process, from which other processes can see whether it is alive."""
    space = _pid_space()
    return (
        f"{uuid.uuid4().hex[:8]} {space} {os.getpid()} {start_ticks(os.getpid())}"
        if space
        else uuid.uuid4().hex
    )


def is_alive(name: str) -> bool | None:
    """Return whether the process with this name runs, or None if it may run elsewhere.

    Elsewhere is another machine, or another container, whose processes cannot be seen.
    """
    match name.split():
        case [_, space, pid, ticks] if space == _pid_space() and pid.isdecimal():
            return is_running(int(pid), ticks)
    return None


def _pid_space() -> str | None:
    """Return the boot and the PID namespace, in which a process id is unique.

    Return None if they cannot be read, as on systems other than Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    except OSError:
        return None
