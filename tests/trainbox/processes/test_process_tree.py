"""The end of a process and of all that it has started."""

import resource
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.support.processes import Processes
from trainbox.processes.process_tree import kill_tree, killed_by, wait_for_tree


@pytest.mark.parametrize(
    ("limit_s", "used_s", "number", "text"),
    [
        (10, 9.99, signal.SIGKILL, "killed by SIGKILL at its CPU time limit of 10 s (raise "),
        (10, 5.0, signal.SIGKILL, "killed by SIGKILL"),
        (resource.RLIM_INFINITY, 99.0, signal.SIGKILL, "killed by SIGKILL"),
        (10, 99.0, signal.SIGSEGV, "killed by SIGSEGV"),
    ],
)
def test_a_kill_at_the_limit_of_cpu_time_is_named(
    monkeypatch: pytest.MonkeyPatch, limit_s: int, used_s: float, number: int, text: str
) -> None:
    used = SimpleNamespace(ru_utime=used_s - 1, ru_stime=1.0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit_s, limit_s))
    monkeypatch.setattr(resource, "getrusage", lambda _: used)
    found = killed_by(number)
    assert found == text or (text.endswith("(raise ") and found == f"{text}`ulimit -t`)")


# Each process starts the next one: "o" has a session of its own, and "x" ends, which the next one
# waits for. The last one prints the ids of all.
_PROGRAM = """
import os, subprocess, sys, time
kinds, pids = sys.argv[1], [*sys.argv[2:], str(os.getpid())]
at = len(pids)
while kinds[at - 2 : at - 1] == "x" and os.getppid() == int(pids[-2]):
    time.sleep(0.01)
if at < len(kinds):
    argv = [sys.executable, "-c", os.environ["PROGRAM"], kinds, *pids]
    subprocess.Popen(argv, start_new_session=kinds[at] == "o")
else:
    print(*pids, flush=True)
kinds[at - 1] == "x" or time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the group is killed")
@pytest.mark.parametrize(
    ("kinds", "killed"), [("--", 2), ("-oo", 3), ("-x-o", 3), ("x-o", 2)], ids=str
)
def test_a_process_is_killed_with_all_that_it_has_started(kinds: str, killed: int) -> None:
    """This includes other sessions, and orphans in the session of a leader that has ended."""
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, kinds],
        env={"PROGRAM": _PROGRAM},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    with child.stdout:
        started = Processes(map(int, child.stdout.readline().split()))
    if kinds[0] == "x":
        child.wait()
    assert kill_tree(child.pid) == killed
    assert started.living() == []
    assert child.wait(60) == (0 if kinds[0] == "x" else -9)


def test_the_wait_for_a_tree_ends_with_its_last_process() -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    threading.Timer(0.1, child.kill).start()
    wait_for_tree(child.pid, 60)
    assert child.wait() == -9
    wait_for_tree(child.pid, 60)
