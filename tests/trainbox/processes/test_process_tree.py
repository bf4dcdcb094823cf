"""The end of a process and of all that it has started."""

import subprocess
import sys

import pytest

from tests.support.processes import Processes
from trainbox.processes.process_tree import kill_tree

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
