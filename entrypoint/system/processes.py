"""Parents and children of processes, as Linux lists them."""

import ctypes
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to send SIGKILL to this process when its parent ends.

    Call it in the child before it executes its program. Otherwise, an orphan would keep training.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(ancestor: int) -> list[int]:
    """Return the ids of the process's children, of their children, and so on."""
    parents = {int(path.name): parent(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found = [ancestor]
    for pid in found:  # the list grows during the loop
        found += [child for child, owner in parents.items() if owner == pid]
    return found[1:]


def parent(pid: int) -> int | None:
    """Return the id of the process's parent; None if the process is gone, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, owner, *_ = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(owner)
