"""Helpers of the tests of faults: gates in a training, mount namespaces and clean digests."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.commands import Ended, Running, Trainbox, wait_until
from tests.support.ranks import EndedRanks, Ranks

TASKS = Path(__file__).with_name("fault_tasks.py")
# 400 steps, 40 in each epoch, in half a second. Dropout and batch norm make a missing or an extra
# step visible in the weights.
GATED = (f"{TASKS}:Gated", "--device", "cpu", "--log-steps", "1", "--run", "r")

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")
needs_root = pytest.mark.skipif(
    sys.platform != "linux"
    or os.geteuid() != 0
    or not all(map(shutil.which, ("unshare", "setpriv", "prlimit"))),
    reason="a mount namespace or another uid needs Linux, root and util-linux",
)


class Gate:
    """A FIFO at which a rank of the task `Gated` waits in its step `step`.

    The step "save" is a call of fsync; see `fault_tasks.HeldInSaves`.
    """

    name = "gate"

    def __init__(self, folder: Path, step: int | str, rank: int = 0) -> None:
        self.path = folder / f"{self.name}-{rank}-{step}"
        self._writer: int | None = None
        os.mkfifo(self.path)

    def wait_for(self, process: Running) -> None:
        """Wait until the rank has reached the gate."""
        wait_until(self._reached, process)

    def release(self) -> None:
        """Let the rank continue, if it lives, and remove the gate."""
        self.path.unlink()
        assert self._writer is not None
        os.close(self._writer)
        self._writer = None

    def _reached(self) -> bool:
        if self._writer is None:
            try:
                self._writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # no process reads it yet
                return False
        return True


class SignalGate(Gate):
    """A gate that the rank leaves when it gets a signal: no step passes before the signal."""

    name = "signal"


def in_a_mount_namespace(ranks: Ranks, scripts: Sequence[str], *words: str) -> EndedRanks:
    """Train in a fork, with mounts that only it sees.

    Each of `scripts` is a shell script that root runs before a start of the same training.
    """
    if subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", ranks.folder], capture_output=True
    ).returncode:
        pytest.skip("mounting is not permitted here, not even in a namespace of our own")
    return ranks(1, json.dumps(scripts), "train", *words, module="tests.support.mounted")


def trainer(*words: str) -> list[str]:
    """Return the command of the trainer alone, which starts a second faster than the launcher."""
    return [sys.executable, "-P", "-m", "trainer", "train", *words]


def messages(ended: Ended | EndedRanks) -> list[str]:
    """Return the messages of Trainbox on standard error, of all ranks."""
    text = ended.err if isinstance(ended, Ended) else "".join(ended.errs)
    return [line for line in text.splitlines() if line.startswith("trainbox: ")]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs/r/checkpoints").iterdir())


def clean_digest(folder: Path, words: Sequence[str]) -> str:
    """Return the digest of the same training without a fault, from a real start."""
    return Trainbox(folder).train(*words).digest
