"""The processes of a running `trainbox train`, as Linux lists them."""

import os
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.ranks import StartedRanks
from trainbox.processes.process_tree import children, parent, start_ticks


def children_of(pid: int) -> list[int]:
    """Return the ids of a process's children that run."""
    return sorted(child for child in children(pid) if parent(child) == pid)


def started_with(mark: str, command: str = "") -> list[int]:
    """Return the ids of the processes that run and have `mark` in their environment.

    `command` is a part of their command line.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_marked = mark.encode() in (path / "environ").read_bytes()
            is_marked = is_marked and command.encode() in (path / "cmdline").read_bytes()
        except OSError:  # the process is gone, or belongs to another user
            continue
        if is_marked and parent(int(path.name)) is not None:
            found.append(int(path.name))
    return found


def wait_until_none(mark: str) -> None:
    """Wait until no process has `mark` in its environment: a killed process needs time to end."""
    deadline_s = time.monotonic() + 120
    while left := started_with(mark):
        assert time.monotonic() < deadline_s, f"still running: {left}"
        time.sleep(0.02)


def _rank_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(
        (variable.decode()[5:] for variable in variables if variable.startswith(b"RANK=")), ""
    )


class Processes:
    """Processes that run now; another process that gets one of their ids later does not count."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.started = {pid: start_ticks(pid) for pid in pids if parent(pid) is not None}

    def living(self) -> list[int]:
        """Return the ids of the processes of which a thread still runs, and may hold a lock."""
        return [
            pid
            for pid, started in self.started.items()
            if parent(pid) is not None and start_ticks(pid) == started
        ]

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + 60
        while self.living():
            assert time.monotonic() < deadline, f"still running: {self.living()}"
            time.sleep(0.02)


class Job(Processes):
    """The processes of a `trainbox train`: the launcher, its ranks and their loader workers.

    `ranks` is their number, or a list of the ranks on this node. A single process is its own
    launcher and has no ranks.
    """

    def __init__(
        self, process: "subprocess.Popen[str] | StartedRanks", ranks: int | Sequence[int]
    ) -> None:
        # The process that asks the NVIDIA driver is in its parent's session.
        (self.launcher,) = (pid for pid in children_of(process.pid) if os.getsid(pid) == pid)
        children = children_of(self.launcher)
        names = [str(rank) for rank in (range(ranks) if isinstance(ranks, int) else ranks)]
        if isinstance(process, StartedRanks):
            # Forks have the environment of their first program; torchrun starts them in order.
            self.ranks = dict(zip(names, children, strict=True))
        else:
            self.ranks = {rank: pid for pid in children if (rank := _rank_of(pid))}
            assert sorted(self.ranks) == names
        self.workers = (
            [worker for rank in self.ranks.values() for worker in children_of(rank)]
            if ranks
            else children
        )
        super().__init__([self.launcher, *children, *self.workers])


def listening(pid: int) -> set[str]:
    """Return the addresses at which the process accepts TCP connections."""
    links = [str(end.readlink()) for end in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {
        link.removeprefix("socket:[").removesuffix("]")
        for link in links
        if link.startswith("socket:[")
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address = bytes.fromhex(words[1].partition(":")[0])
                found.add(socket.inet_ntoa(address[::-1]) if table == "tcp" else address.hex())
    return found
