"""Processes, their parents and their children, as Linux lists them."""

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbox.errors import signal_name

if TYPE_CHECKING:
    import subprocess

# A terminal or a scheduler sends these to stop a job, and to all of its processes: SLURM SIGUSR1,
# Grid Engine and LSF SIGUSR2, and the kernel SIGXCPU at a limit of CPU time.
STOP_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP),
    signal.SIGXCPU,
)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Fields of /proc/PID/stat after the program's name.
_STATE, _PARENT, _SESSION, _THREADS, _START_TICKS = 0, 1, 3, 17, 19
_TIMES = slice(11, 15)  # of the process and its ended children, in ticks


def heeded_stop_signals() -> dict[signal.Signals, Any]:
    """Return the handlers of the stop signals, except signals that stay ignored, as under nohup."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    return {n: handler for n, handler in handlers.items() if handler is not signal.SIG_IGN}


def ignore_stop_signals() -> None:
    """Ignore the signals that stop a job."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(started_by: int | None = None) -> None:
    """Ask Linux to send SIGKILL to this process when its parent ends.

    Call it in the child before it executes its program, or give the process that has `started_by`
    this one, which may have ended since. Otherwise, an orphan would keep training.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if started_by not in (None, os.getppid()):
            os.kill(os.getpid(), signal.SIGKILL)


def start_child(argv: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a program that ends with this process; `Popen` gets the `options`.

    This process must not have other threads, as the child runs Python before the program.
    """
    import subprocess  # a launch plan does without its 5 ms

    ends = functools.partial(die_with_parent, os.getpid())
    return subprocess.Popen(argv, preexec_fn=ends, **options)  # noqa: PLW1509


def adopt_orphans() -> None:
    """Ask Linux to make this process the parent of descendants whose own parents end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_tree(root: int, within_s: float = 5.0) -> int:
    """Kill the session that `root` leads and all descendants, and return their number.

    Our own session is left, so `kill_tree(os.getpid())` kills what launched programs have left
    behind. A process that hangs in the kernel is left after `within_s`.
    """
    found = set[int]()
    while new := _tree(root) - found:
        _send(new, signal.SIGSTOP)  # a stopped process starts no other one
        found |= new
    _send(found, signal.SIGKILL)
    if sys.platform != "linux" and root != os.getpid():  # `_tree` finds nothing there
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(root, signal.SIGKILL)
    deadline_s = time.monotonic() + within_s
    while any(parent(pid) is not None for pid in found) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    if root == os.getpid():
        for pid in found:  # a killed process is listed until its parent, now this one, waits
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return len(found)


def wait_for_tree(root: int, within_s: float) -> None:
    """Wait until the processes that `kill_tree` would kill have ended, at most `within_s`."""
    deadline_s = time.monotonic() + within_s
    while _tree(root) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _tree(root: int) -> set[int]:
    """Return the processes in the session of `root` or below it that are not in our session."""
    stats = {pid: stat for pid in _pids() if (stat := _stat(pid)) and not _has_ended(stat)}
    roots = {root} | {pid for pid, stat in stats.items() if stat[_SESSION] == str(root)}
    found = roots
    while more := {pid for pid, stat in stats.items() if int(stat[_PARENT]) in found} - found:
        found |= more
    own_session = str(os.getsid(0))
    return {pid for pid in found & stats.keys() if stats[pid][_SESSION] != own_session}


def killed_by(number: int) -> str:
    """Return `killed by SIGKILL` for the end of a child by this signal.

    Linux also sends SIGKILL at the hard limit of a process's CPU time.
    """
    import resource  # few children are killed

    limit_s = resource.getrlimit(resource.RLIMIT_CPU)[1]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The kernel counts in ticks.
    is_used_up = resource.RLIM_INFINITY != limit_s <= used.ru_utime + used.ru_stime + 1
    if number == signal.SIGKILL and is_used_up:
        return f"killed by SIGKILL at its CPU time limit of {limit_s} s (raise `ulimit -t`)"
    return f"killed by {signal_name(number)}"


def launched_cpu_s(with_children: bool) -> float:
    """Return the CPU seconds of all processes that this process has launched in other sessions.

    Without `with_children`, its own child is left out if it has children, as a launcher polls.
    """
    stats = [stat for pid in _tree(os.getpid()) if (stat := _stat(pid))]
    counted = [stat for stat in stats if with_children or stat[_PARENT] != str(os.getpid())]
    ticks = sum(int(field) for stat in counted or stats for field in stat[_TIMES])
    return ticks / os.sysconf("SC_CLK_TCK")


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def forward_signal(leader: int, number: signal.Signals) -> None:
    """Send the signal to a program of a user, whose process `leader` leads its process group.

    SIGINT is sent to the whole group, as a terminal does at Ctrl-C. Otherwise, a program that waits
    for processes that it has started would wait until they have finished.
    """
    with contextlib.suppress(ProcessLookupError):  # the process has just exited
        if number == signal.SIGINT:
            os.killpg(leader, number)
        else:
            os.kill(leader, number)


def children(ancestor: int) -> list[int]:
    """Return the ids of the processes whose parent is `ancestor`, also of ended processes."""
    return [pid for pid in _pids() if (stat := _stat(pid)) and stat[_PARENT] == str(ancestor)]


def parent(pid: int) -> int | None:
    """Return the id of the process's parent; None if the process has ended."""
    stat = _stat(pid)
    return None if stat is None or _has_ended(stat) else int(stat[_PARENT])


def is_running(pid: int, ticks: str) -> bool:
    """Return whether the process with this id that started at these ticks since boot runs."""
    if (stat := _stat(pid)) is not None:
        return stat[_START_TICKS] == ticks and not _has_ended(stat)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # of another user, whose processes are hidden in /proc
    return True


def _has_ended(stat: list[str]) -> bool:
    """Return whether no thread is left. The first thread may end before the others."""
    return stat[_STATE] in "ZX" and int(stat[_THREADS]) <= 1


def start_ticks(pid: int) -> str | None:
    """Return the start of the process in ticks since boot, or None if it does not exist."""
    return stat[_START_TICKS] if (stat := _stat(pid)) else None


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").glob("[0-9]*"))


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the program's name."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()
