"""Trainings inside the test's own process, which do not start Python or import torch again."""

import contextlib
import dataclasses
import functools
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import entrypoint.cli.commands
from entrypoint.cli.planning import Launch
from tests.support.commands import HIDDEN_GPUS
from tests.support.tiny import TINY, Tiny
from trainbox.errors import Preempted
from trainbox.files.sidecar import steps_in
from trainbox.options.config import Config
from trainbox.processes.environment import launch_facts
from trainbox.task import Task
from trainer.cli.commands import main
from trainer.records.digest import value_digest
from trainer.records.jsonl import read_entries
from trainer.records.run_log import RunLog
from trainer.session.train import train_task
from trainer.system import sources
from trainer.system.signals import STOP_SIGNALS, StopRequest

_LAUNCH_NAMES = ("TASK", "SET", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class StopAfter(StopRequest):
    """A request to stop that arrives in step number `steps` of one `Here.train`."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the steps of a training, at the call that advances its progress bar."""
        advance = RunLog.advance

        def count(run: RunLog) -> None:
            advance(run)
            self._left -= 1
            if self._left == 0:
                self.signal_name = "SIGTERM"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunLog, "advance", count)
            yield


@dataclass
class Here:
    """Trains in the working folder, which is `folder`."""

    folder: Path
    patch: pytest.MonkeyPatch
    rehearses: bool = False  # tests of other promises count forwards and calls
    # The saves that were still under way when the last training ended.
    saving: list[threading.Thread] = field(default_factory=list)
    workers_left: list[multiprocessing.process.BaseProcess] = field(default_factory=list)

    def train(
        self,
        run: str = "r",
        *,
        task: str = TINY,
        resume: str = "auto",
        stop: StopRequest | None = None,
        rehearses: bool | None = None,
        **settings: Any,
    ) -> str:
        """Train to the end with the settings of a `Config`, and return what was printed."""
        stop = StopRequest() if stop is None else stop
        config = Config(task=task, **settings)
        counting = stop.counting() if isinstance(stop, StopAfter) else contextlib.nullcontext()
        with self._as_a_process_of_its_own() as (out, _), counting:
            train_task(
                config,
                stop,
                "cpu",
                Path("runs"),
                run,
                Path("data"),
                resume,
                rehearses=self.rehearses if rehearses is None else rehearses,
            )
        return out.getvalue()

    def plant(self, **members: Any) -> None:
        """Replace methods and attributes of the task `Tiny` until the end of the test."""
        for name, member in members.items():
            self.patch.setattr(Tiny, name, member, raising=False)

    def command(self, *words: str) -> tuple[int, str, str]:
        """Run `trainbox` with these arguments, whose trainer runs in this process as well.

        Return its exit code, stdout and stderr. A command that only the trainer has is run by it.
        """
        verbs = entrypoint.cli.commands.VERBS
        with self._as_a_process_of_its_own() as (out, err), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["trainbox", *words])
            pid, real_exit = os.getpid(), os._exit
            patch.setattr(
                # a loader worker, which is a fork, ends
                os,
                "_exit",
                lambda code: sys.exit(code) if os.getpid() == pid else real_exit(code),
            )
            patch.setattr(os, "execve", lambda _path, argv, env: _train(patch, argv, env))
            for module in ("launching", "stored"):
                patch.setattr(
                    f"entrypoint.cli.{module}.supervised",
                    lambda launch, _kind: _train(patch, launch.plan.argv, _told(launch)),
                )
            with pytest.raises(SystemExit) as ended:
                (entrypoint.cli.commands.main if words[0] in verbs else main)()
        return int(ended.value.code or 0), out.getvalue(), err.getvalue()

    def succeeds(self, *words: str) -> str:
        """Run `trainbox`, which must succeed without a message, and return its stdout."""
        code, out, err = self.command(*words)
        assert (code, err) == (0, ""), err
        return out

    def refused(self, *words: str, code: int = 2, silent: bool = False) -> str:
        """Run `trainbox`, which must exit with `code` and a message of one line; return the line.

        If it is `silent`, it prints nothing else.
        """
        found, out, err = self.command(*words)
        assert (found, err.count("\n")) == (code, 1), err
        assert err.startswith("trainbox: ")
        assert not silent or out == ""
        return err

    def stopped(self, steps: int, run: str = "r", **settings: Any) -> None:
        """Train, and stop after `steps` steps with a checkpoint."""
        with pytest.raises(Preempted):
            self.train(run, stop=StopAfter(steps), **settings)

    @contextlib.contextmanager
    def _as_a_process_of_its_own(self) -> Iterator[tuple[io.StringIO, io.StringIO]]:
        """Yield the captured output; at the end, do what the end of a process does.

        Wait for the threads, and close the files, which frees the lock.
        """
        opened: list[RunLog] = []

        class Noted(RunLog):
            def __init__(self, *arguments: Any) -> None:
                opened.append(self)
                super().__init__(*arguments)

        out, err = Captured(), Captured()
        threads = torch.get_num_threads()
        try:
            with (
                pytest.MonkeyPatch.context() as patch,
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                patch.setattr("trainer.session.train.RunLog", Noted)
                patch.setattr(sys, "path", [*sys.path])  # the folder of a task is added to it
                yield out, err
        finally:
            torch.set_num_threads(threads)
            self.saving = [
                thread for thread in threading.enumerate() if thread.name == "checkpoint"
            ]
            for thread in self.saving:
                thread.join()
            self.workers_left = multiprocessing.active_children()
            for worker in self.workers_left:  # the kernel kills loader workers
                worker.kill()
                worker.join()
            for run in opened:
                close_files(run)

    def path(self, run: str = "r") -> Path:
        return self.folder / "runs" / run

    def entries(self, kind: str, run: str = "r") -> list[dict[str, Any]]:
        lines = (self.path(run) / "metrics.jsonl").read_text().splitlines()
        return [entry for line in lines if (entry := json.loads(line))["kind"] == kind]

    def json(self, name: str, run: str = "r") -> dict[str, Any]:
        """Return the object in a JSON file of the run."""
        found: dict[str, Any] = json.loads((self.path(run) / name).read_text())
        return found

    def edit(self, name: str, run: str = "r", **changes: Any) -> None:
        """Change entries of a JSON file of the run."""
        (self.path(run) / name).write_text(json.dumps(self.json(name, run) | changes))

    def digests(self, run: str = "r") -> list[dict[str, Any]]:
        """Return the entries by step; a checkpoint may be written after later steps."""
        entries = read_entries(self.path(run) / "digests.jsonl")
        return sorted(entries, key=lambda entry: int(entry["step"]))

    def steps(self, run: str = "r") -> list[int]:
        """Return the steps that have a checkpoint; each must have both tensors and a sidecar."""
        found = [
            {
                int(path.stem.removeprefix("step-"))
                for path in (self.path(run) / "checkpoints").glob(f"step-*{suffix}")
            }
            for suffix in (".pt", ".json")
        ]
        assert found[0] == found[1]
        return sorted(found[0])

    def state(self, step: int, run: str = "r") -> dict[str, Any]:
        state = torch.load(
            self.path(run) / "checkpoints" / f"step-{step:08d}.pt", weights_only=True
        )
        assert isinstance(state, dict)
        return state

    def weights(self, run: str = "r") -> dict[str, Tensor]:
        """Return the weights of the newest checkpoint. Older ones may be damaged."""
        model = self.state(steps_in(self.path(run) / "checkpoints")[-1], run)["model"]
        assert isinstance(model, dict)
        return model

    def digest(self, run: str = "r") -> str:
        return value_digest(self.weights(run))


class Captured(io.StringIO):
    """Captured output, with what the streams of a process have as well."""

    encoding = "utf-8"

    def reconfigure(self, errors: str) -> None:
        """Accept the handling of what cannot be encoded: UTF-8 encodes all but surrogates."""


def _told(launch: Launch) -> dict[str, str]:
    """Return the variables of the launcher for the trainer, without what depends on the machine."""
    facts = dataclasses.replace(launch_facts(launch.plan.env), strategy="single", reason="", cpus=0)
    return facts.variable()


def _train(patch: pytest.MonkeyPatch, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Run the trainer's command line `argv` in this process."""
    for name, value in env.items():
        patch.setenv(name, value)
    patch.setattr(sys, "argv", list(argv[list(argv).index("trainer") :]))
    main()


def files_of(run: Path, without: str = "") -> dict[str, bytes]:
    """Return the contents of a run's files, except files in the folder `without`."""
    files = (path for path in run.rglob("*") if path.is_file() and without not in path.parts)
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def board_of(run: Path) -> Any:
    """Return what TensorBoard shows of a run, with all pictures."""
    from tensorboard.backend.event_processing.event_accumulator import IMAGES, EventAccumulator

    board = EventAccumulator(str(run), {IMAGES: 0})
    board.Reload()
    return board


def open_files(run: RunLog) -> list[io.TextIOWrapper]:
    """Return the files that a run has open."""
    return [
        value
        for part in (vars(run).get("folder"), vars(run).get("console"))
        if part is not None  # a run that could not be opened has neither
        for value in vars(part).values()
        if isinstance(value, io.TextIOWrapper) and not value.closed
    ]


def close_files(run: RunLog) -> None:
    for file in open_files(run):
        file.close()


@contextlib.contextmanager
def _without_other_tests() -> Iterator[None]:
    """Hide the modules of tests that this test's own process would not have loaded.

    pytest has imported all of them. Trainbox looks at the attributes and the files of each module
    of a user at each digest, which would take most of the time of a training.
    """
    file = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
    own = file.removesuffix(".py").replace("/", ".")
    others = {
        name: module
        for name, module in sys.modules.copy().items()
        if name.partition(".")[0] in ("tests", "deploy")
        and name != own
        and (".test_" in name or not _defines_tasks(module))
    }
    sources._of_libraries.update(others)
    yield
    for name in others:
        sources._of_libraries.pop(name, None)


@functools.cache
def _defines_tasks(module: ModuleType) -> bool:
    classes = [value for value in list(vars(module).values()) if isinstance(value, type)]
    return any(issubclass(cls, Task) and cls.__module__ == module.__name__ for cls in classes)


@contextlib.contextmanager
def training_here(folder: Path) -> Iterator[Here]:
    """Train in `folder`; afterwards restore the working folder, the environment, the signals and
    torch's switches.
    """
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with (
        _without_other_tests(),
        contextlib.chdir(folder),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in list(os.environ):
            if name.startswith(("TRAINBOX_", "CUDA_")) or name in _LAUNCH_NAMES:
                patch.delenv(name)
        for name, value in HIDDEN_GPUS.items():
            patch.setenv(name, value)
        yield Here(folder, patch)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    with training_here(tmp_path) as runner:
        yield runner
