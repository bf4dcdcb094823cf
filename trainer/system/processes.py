"""Read parents, children and start times of processes from Linux.

`entrypoint.system.processes` does this for the entrypoint, which does not import the trainer.
"""

import ctypes
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Fields of /proc/PID/stat after the program's name.
_PARENT, _START_TICKS = 1, 19


def die_with_parent() -> None:
    """Let Linux kill this process when its parent exits, so that no orphan continues to train."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def children(parent: int) -> list[int]:
    """Return the ids of the processes whose parent is `parent`."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if _stat(pid, _PARENT) == str(parent)]


def start_ticks(pid: int) -> str | None:
    """Return the start of the process in ticks since boot, or None if it does not exist."""
    return _stat(pid, _START_TICKS)


def _stat(pid: int, field: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[field]
