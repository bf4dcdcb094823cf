"""Processes, their parents and their children, as Linux lists them."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Fields of /proc/PID/stat after the program's name.
_STATE, _PARENT, _START_TICKS = 0, 1, 19


def die_with_parent() -> None:
    """Ask Linux to send SIGKILL to this process when its parent ends.

    Call it in the child before it executes its program. Otherwise, an orphan would keep training.
    """
    if sys.platform == "linux":
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
    parents = {pid: parent(pid) for pid in _pids()}
    found = [ancestor]
    for pid in found:  # the list grows during the loop
        found += [child for child, owner in parents.items() if owner == pid]
    return found[1:]


def children(ancestor: int) -> list[int]:
    """Return the ids of the processes whose parent is `ancestor`, with those that have ended."""
    return [pid for pid in _pids() if _stat(pid, _PARENT) == str(ancestor)]


def parent(pid: int) -> int | None:
    """Return the id of the process's parent; None if the process is gone, or a zombie."""
    state, owner = _stat(pid, _STATE), _stat(pid, _PARENT)
    return None if state is None or owner is None or state in "ZX" else int(owner)


def start_ticks(pid: int) -> str | None:
    """Return the start of the process in ticks since boot, or None if it does not exist."""
    return _stat(pid, _START_TICKS)


def with_variable(name: str, value: str) -> list[int]:
    """Return the ids of the processes that were started with the variable `name` set to `value`."""
    variable = f"{name}={value}".encode()
    found = []
    for pid in _pids():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or belongs to another user
            continue
        if variable in variables:
            found.append(pid)
    return found


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").glob("[0-9]*"))


def _stat(pid: int, field: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[field]
