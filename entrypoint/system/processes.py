"""Parents and children of processes, as Linux lists them."""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent() -> None:
    """Ask Linux to send SIGKILL to this process when its parent ends.

    Call it in the child before it executes its program. Otherwise, an orphan would keep training.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Ask Linux to make this process the parent of descendants whose own parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_other_sessions(within_s: float = 5.0) -> int:
    """Kill the descendants of this process that are in another session, and return their number.

    A launched program has a session of its own. Our helper processes stay in ours. A process that
    hangs in the kernel is left after `within_s`.
    """
    killed: set[int] = set()
    deadline_s = time.monotonic() + within_s
    while True:
        found = {pid for pid in descendants(os.getpid()) if _session(pid) != os.getsid(0)}
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        # A killed process stays in the list of processes until its parent, now this one, waits.
        for pid in killed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not any(_exists(pid) for pid in killed) or time.monotonic() > deadline_s:
            return len(killed)
        time.sleep(0.01)


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return os.getsid(0)  # it has just ended


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


def with_variable(name: str, value: str) -> list[int]:
    """Return the ids of the processes that were started with the variable `name` set to `value`."""
    variable = f"{name}={value}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or belongs to another user
            continue
        if variable in variables:
            found.append(int(path.parent.name))
    return found
