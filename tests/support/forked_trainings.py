"""Forks instead of the trainings that `trainbox bench` and `trainbox drill` start.

Both commands start many small trainings, and most of the time of each is the start of Python and
torch. Here the command runs in the test's process, and each of its trainings is a fork of a process
that has loaded torch.
"""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pytest

import entrypoint.bench.runs
import entrypoint.cli.commands
import entrypoint.drill.starts
from tests.support.commands import Ended, Trainbox, clean_environment
from tests.support.ranks import Ranks

ForkedCommand = Callable[..., Ended]


class ForkedTraining:
    """A `trainbox train` in forks, with the methods of `subprocess.Popen` that its caller uses."""

    def __init__(
        self, forked: Trainbox, ranks: Ranks, words: list[str], env: Mapping[str, str], out: str
    ) -> None:
        plan = json.loads(forked("plan", *words, env=env).out)
        rank_words = plan["argv"][plan["argv"].index("train") + 1 :]
        own = {
            name: value
            for name, value in env.items()
            if name == "SET" or name.startswith("TRAINBOX_")
        }
        self.returncode: int | None = None
        self._out = Path(out)
        self._training = ranks.start(
            plan["nproc_per_node"], "train", *rank_words, env=own | plan["env"]
        )

    @property
    def pid(self) -> "ForkedTraining":
        """What `kill_tree` gets, which here is replaced by `_kill`."""
        return self

    def send_signal(self, number: signal.Signals) -> None:
        self._training.send_signal(number)

    def poll(self) -> int | None:
        if self.returncode is None and (code := self._training.poll()) is not None:
            printed = [*self._training.printed("out"), *self._training.printed("err")]
            self._out.write_text("".join(printed))
            self.returncode = code
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        deadline_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("train", timeout)
            time.sleep(0.02)
        return code


def _kill(training: ForkedTraining, _within_s: float = 0.0) -> None:
    training.send_signal(signal.SIGKILL)


class _ForkedPrograms:
    """What a command uses of the module `subprocess`, with forks instead of starts."""

    DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, forked: Trainbox, ranks: Ranks) -> None:
        self._forked, self._ranks = forked, ranks

    def run(self, command: list[str], **more: Any) -> "subprocess.CompletedProcess[str]":
        _, package, *words = command[command.index("-m") :]
        if package == "trainer":
            return subprocess.CompletedProcess(command, self._ranks(1, *words).codes[0])
        ended = self._forked(*words, env=more["env"])
        return subprocess.CompletedProcess(command, ended.code, ended.out, ended.err)

    def start_child(
        self, command: list[str], *, env: Mapping[str, str], stdout: IO[str], **_more: Any
    ) -> ForkedTraining:
        words = command[command.index("train") + 1 :]
        return ForkedTraining(self._forked, self._ranks, words, env, stdout.name)


@pytest.fixture
def forked_trainings(
    forked: Trainbox,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> ForkedCommand:
    """Run `trainbox bench` or `trainbox drill` in this process, with forks for its trainings."""
    modules: dict[str, ModuleType] = {
        "bench": entrypoint.bench.runs,
        "drill": entrypoint.drill.starts,
    }
    temporary = forked.folder / "tmp"

    def run(*words: str, env: Mapping[str, str] | None = None) -> Ended:
        temporary.mkdir(exist_ok=True)
        with monkeypatch.context() as patch, contextlib.chdir(forked.folder):
            patch.setattr(tempfile, "tempdir", str(temporary))
            forks = _ForkedPrograms(forked, ranks)
            patch.setattr(modules[words[0]], "subprocess", forks)
            patch.setattr(modules[words[0]], "start_child", forks.start_child)
            patch.setattr(modules[words[0]], "kill_tree", _kill)
            patch.setattr("os.environ", clean_environment(**(env or {})))
            patch.setattr(sys, "argv", ["trainbox", *words])
            with pytest.raises(SystemExit) as ended:
                entrypoint.cli.commands.main()
        streams = capfd.readouterr()
        return Ended(int(ended.value.code or 0), streams.out, streams.err)

    return run
