"""Trainings without a launcher, forked from a process that has torch loaded.

A start of Python and torch takes some seconds, most of a small training's time. Each fork is
`python -m trainer` (or another module) with the variables of the launcher and torchrun.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import clean_environment, digest_in, logged, wait_until
from tests.support.fork import run_and_exit
from tests.support.paths import ROOT

_LAUNCHES = "tests.support.launches"
# What the command and torchrun import.
_OF_LAUNCHES = (
    "entrypoint.cli.planning",
    "entrypoint.cli.train",
    "entrypoint.driver.nvml",
    "torch.distributed.run",
    "trainer.launch.rendezvous",
)
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


class Forks:
    """A process that has torch loaded and forks ranks, which die with it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._jobs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env=clean_environment(OMP_NUM_THREADS="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def job_folder(self) -> Path:
        """Return a new empty folder, which `close` removes."""
        self._jobs += 1
        folder = Path(self._folder.name, str(self._jobs))
        folder.mkdir()
        return folder

    def ask(self, order: str, **arguments: Any) -> Any:
        """Return what the process answers to one order of `_Server`."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps([order, arguments]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process and, with it, the ranks that still run."""
        self._process.kill()
        self._process.communicate()
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
        shared = {"TRAINBOX_STRATEGY": strategy, "TRAINBOX_DEVICE": "cpu", **(env or {})}
        if strategy != "single":
            shared |= {
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "TRAINBOX_STORE": str(job / "store"),
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
        return self._fork(self.forks.job_folder(), _LAUNCHES, words, [dict(env or {})])

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
            words=words,
            environments=environments,
        )
        self.started.append(StartedRanks(self.forks, job, pids))
        return self.started[-1]

    def __call__(self, processes: int, *words: str, **options: Any) -> EndedRanks:
        """Run a command until it has ended on each rank; `options` are those of `start`."""
        return self.start(processes, *words, **options).wait()

    def train(self, processes: int, *words: str, **options: Any) -> EndedRanks:
        """Run a training that must succeed; `options` are those of `start`."""
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


class _Server:
    """The orders of `Forks.ask`."""

    def fork(
        self,
        folder: str,
        job: str,
        module: str,
        words: Sequence[str],
        environments: Sequence[dict[str, str]],
    ) -> list[int]:
        """Start a command on each rank and return the process ids."""
        if words[0] == "sweep":
            from tests.support import sweep_forks

            sweep_forks.install()
        if module == _LAUNCHES:
            for name in _OF_LAUNCHES:
                importlib.import_module(name)
        return [
            _fork(folder, job, rank, module, words, environment)
            for rank, environment in enumerate(environments)
        ]

    def code(self, pid: int) -> int | None:
        """Return a rank's exit code, once; None while it runs."""
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None


def _fork(
    folder: str,
    job: str,
    rank: int,
    module: str,
    words: Sequence[str],
    environment: dict[str, str],
) -> int:
    if (pid := os.fork()) == 0:
        try:
            from trainer.system.processes import die_with_parent

            die_with_parent()
            os.chdir(folder)
            os.environ.update(environment)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, name in ((1, "out"), (2, "err")):
                file = os.open(f"{job}/{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, number)
        except BaseException:  # noqa: BLE001 - a fork must not return into the server
            traceback.print_exc()
            os._exit(1)
        run_and_exit(module, words)
    return pid


def _serve() -> None:
    faulthandler.enable()  # a crash writes its stack to the rank's own `err`
    # All that a training imports, so that no fork has to.
    for name in (
        "tensorboard.plugins.custom_scalar.summary",
        "torch._dynamo",
        "torch.utils.tensorboard",
        "trainer.cli.commands",
        "trainer.cli.sweep_run",
        "trainer.cli.train",
        "trainer.cli.verify",
        "trainer.parallel.fsdp",
        "trainer.session.verify",
    ):
        importlib.import_module(name)
    from trainer.system.sources import loaded_sources

    loaded_sources()  # looks at each module's file, and remembers the libraries'
    gc.freeze()  # a collection in a fork would look at all of these modules, and copy them
    server = _Server()
    for line in sys.stdin:
        order, arguments = json.loads(line)
        print(json.dumps(getattr(server, order)(**arguments)), flush=True)


if __name__ == "__main__":
    _serve()
