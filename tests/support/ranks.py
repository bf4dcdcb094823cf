"""Trainings without a launcher, forked from a process that has torch loaded.

A start of Python and torch takes some seconds, most of a small training's time. Each fork is
`python -m trainer` (or another module) with the variables of the launcher and torchrun.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import digest_in, logged, quick, wait_until
from tests.support.fork_server import LAUNCHES, SHARED, start
from trainbox.processes.environment import Internal, LaunchFacts

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


class Forks:
    """A process that has torch loaded and forks ranks, which die with it.

    If pytest was started by `tests.support.suite`, all workers share one start of torch.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._jobs = 0
        self._process: subprocess.Popen[bytes] | None = None
        if address := os.environ.get(SHARED):
            self._connection = socket.socket(socket.AF_UNIX)
            self._connection.connect(address)
        else:
            self._connection, other = socket.socketpair()
            with other:
                self._process = start(other)
        self._answers = self._connection.makefile()

    def job_folder(self) -> Path:
        """Return a new empty folder, which `close` removes."""
        self._jobs += 1
        folder = Path(self._folder.name, str(self._jobs))
        folder.mkdir()
        return folder

    def ask(self, order: str, **arguments: Any) -> Any:
        """Return what the process answers to one order of `fork_server.Server`."""
        self._connection.sendall(json.dumps([order, arguments]).encode() + b"\n")
        return json.loads(self._answers.readline())

    def close(self) -> None:
        """End the process and, with it, the ranks that still run."""
        self._connection.shutdown(socket.SHUT_WR)
        self._answers.read()  # until the process has ended
        self._answers.close()
        self._connection.close()
        if self._process:
            self._process.wait()
        self._folder.cleanup()


@dataclass
class EndedRanks:
    """A command that has ended on each rank."""

    codes: list[int]
    outs: list[str]
    errs: list[str]

    @property
    def code(self) -> int:
        """The exit code of rank 0."""
        return self.codes[0]

    @property
    def out(self) -> str:
        """The output of rank 0; the others print nothing."""
        return self.outs[0]

    @property
    def digest(self) -> str:
        return digest_in(self.out)


class StartedRanks:
    """A command that runs on each rank; also has what `wait_until` needs of a Popen."""

    def __init__(self, forks: Forks, folder: Path, pids: list[int]) -> None:
        self.pids = pids
        self._forks, self._folder = forks, folder
        self._codes: dict[int, int] = {}

    @property
    def pid(self) -> int:
        """The process id of rank 0, or of a launched command."""
        return self.pids[0]

    def poll(self) -> int | None:
        """Return None while a rank runs, then the code of the first rank that failed, or 0."""
        for pid in self.pids:
            if pid not in self._codes and (code := self._forks.ask("code", pid=pid)) is not None:
                self._codes[pid] = code
        if len(self._codes) < len(self.pids):
            return None
        return next((self._codes[pid] for pid in self.pids if self._codes[pid]), 0)

    def wait(self) -> EndedRanks:
        """Wait until all ranks have ended."""
        wait_until(lambda: self.poll() is not None, self)
        return EndedRanks(
            [self._codes[pid] for pid in self.pids], self.printed("out"), self.printed("err")
        )

    def printed(self, stream: str) -> list[str]:
        """Return what each rank has printed to `out` or `err`, so far."""
        files = [self._folder / f"{stream}-{rank}" for rank in range(len(self.pids))]
        # A rank that has just been forked may not have opened its file.
        return [file.read_text() if file.exists() else "" for file in files]

    def send_signal(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to one rank, or to each that still runs."""
        self.poll()
        for pid in self.pids if rank is None else [self.pids[rank]]:
            if pid not in self._codes:
                os.kill(pid, number)


@dataclass
class Ranks:
    """Runs `python -m trainer` on one or several forked processes in `folder`."""

    forks: Forks
    folder: Path
    started: list[StartedRanks] = field(default_factory=list)

    def start(
        self,
        processes: int,
        *words: str,
        strategy: str | None = None,
        env: Mapping[str, str] | None = None,
        env_by_rank: Sequence[Mapping[str, str]] = (),
        module: str = "trainer",
    ) -> StartedRanks:
        """Start a command, by default with the strategy that `trainbox` chooses on the CPU.

        `env` is for all ranks, and `env_by_rank` has one mapping for each.
        """
        strategy = strategy or ("single" if processes == 1 else "ddp")
        job = self.forks.job_folder()
        shared = {**LaunchFacts("cpu", strategy).variable(), **(env or {})}
        if strategy != "single":
            shared |= {
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                Internal.STORE: str(job / "store"),
                "GLOO_SOCKET_IFNAME": _LOOPBACK,
            }
        environments = [dict(shared) for _ in range(processes)]
        if strategy != "single":
            for rank in range(processes):
                environments[rank] |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank, variables in enumerate(env_by_rank):
            environments[rank] |= variables
        return self._fork(job, module, words, environments)

    def launch(self, *words: str, env: Mapping[str, str] | None = None) -> StartedRanks:
        """Start `trainbox ARGUMENTS`, whose launcher and ranks are forks as well."""
        return self._fork(self.forks.job_folder(), LAUNCHES, words, [dict(env or {})])

    def _fork(
        self,
        job: Path,
        module: str,
        words: Sequence[str],
        environments: Sequence[Mapping[str, str]],
    ) -> StartedRanks:
        pids = self.forks.ask(
            "fork",
            folder=str(self.folder),
            job=str(job),
            module=module,
            words=quick(words),
            environments=environments,
        )
        self.started.append(StartedRanks(self.forks, job, pids))
        return self.started[-1]

    def __call__(self, processes: int, *words: str, **options: Any) -> EndedRanks:
        """Run a command until it has ended on each rank; `start` gets the `options`."""
        return self.start(processes, *words, **options).wait()

    def train(self, processes: int, *words: str, **options: Any) -> EndedRanks:
        """Run a training that must succeed; `start` gets the `options`."""
        ended = self(processes, "train", *words, **options)
        assert ended.codes == [0] * processes, ended
        return ended

    def entries(self, run: str, kind: str) -> list[dict[str, Any]]:
        """Return the run's entries of `kind` in metrics.jsonl, so far."""
        return logged(self.folder / "runs" / run, kind)

    def kill(self) -> None:
        """Kill what still runs."""
        for each in self.started:
            each.send_signal(signal.SIGKILL)
            each.wait()


@contextlib.contextmanager
def ranks_in(forks: Forks, folder: Path) -> Iterator[Ranks]:
    """Run ranks in `folder`; at the end, none of them runs any more."""
    ranks = Ranks(forks, folder)
    try:
        yield ranks
    finally:
        ranks.kill()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """The process that forks ranks; each pytest worker has one, from its first test that asks."""
    process = Forks()
    yield process
    process.close()


@pytest.fixture
def ranks(forks: Forks, tmp_path: Path) -> Iterator[Ranks]:
    with ranks_in(forks, tmp_path) as running:
        yield running
