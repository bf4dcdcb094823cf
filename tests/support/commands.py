"""Run the real commands, and wait for what they write."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from trainbox.disclosure.variables import LAUNCH_NAMES

# Variables that a shell or a scheduler may set and a test must not inherit. COLUMNS is the width of
# help texts. PYTHONUNBUFFERED hides what happens to users, who do not set it.
_LAUNCH_NAMES = {*LAUNCH_NAMES, "SET", "RUN_IN", "COLUMNS", "VIRTUAL_ENV", "CONDA_PREFIX"} | {
    "PYTHONUNBUFFERED"
}
_LAUNCH_PREFIXES = (
    "TRAINBOX_",
    "RDZV_",
    "SLURM_",
    "PET_",
    "KUBERNETES_",
    "CUDA_",
    "NVIDIA_",
    "OMP_",
)


# Tests must not see the GPUs of this machine. Only the checks of tests/gpu use them.
HIDDEN_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the environment of a command, without GPUs unless `extra` loads the NVML stub."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCH_NAMES and not name.startswith(_LAUNCH_PREFIXES)
    }
    if "NVML_STUB_CONFIG" not in extra:
        kept |= HIDDEN_GPUS
    # No test may reach the network: downloads are refused at once.
    return kept | {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"} | extra


# A shell ignores SIGINT for a background job, and nohup ignores SIGHUP. Programs inherit that, but
# a test that sends such a signal expects it to arrive.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Tests run side by side, and more threads than cores make each of them much slower.
os.environ["OMP_NUM_THREADS"] = "1"


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def digest(self) -> str:
        return digest_in(self.out)


def digest_in(out: str) -> str:
    """Return the digest that a training has printed."""
    match = re.search(r"^digest +([0-9a-f]{64})", out, re.MULTILINE)
    assert match, f"no digest in:\n{out}"
    return match[1]


def logged(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the entries of `kind` in the metrics.jsonl of the folder `run`, so far."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [entry for line in lines if (entry := json.loads(line))["kind"] == kind]


def quick(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments of a command, of which a training does not rehearse its resume.

    A rehearsal takes longer than the few steps of a test. Its own tests give --rehearsal. A command
    in a program of a test, as in a mount namespace, still rehearses.
    """
    if arguments[:1] == ("train",) and "--rehearsal" not in arguments:
        return "train", "--no-rehearsal", *arguments[1:]
    return arguments


class Running(Protocol):
    """A command that `wait_until` can watch."""

    def poll(self) -> int | None: ...
    def wait(self) -> object: ...


@dataclass
class Trainbox:
    """Runs `trainbox` (or a package's own command) in an empty folder."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self,
        *words: str,
        module: str = "entrypoint",
        env: Mapping[str, str] | None = None,
        inside: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """Start a command; `inside` is a command that runs it in another environment."""
        process = subprocess.Popen(
            [*inside, sys.executable, "-P", "-m", module, *quick(words)],
            cwd=self.folder,
            env=clean_environment(
                **({"OMP_NUM_THREADS": "1"} if "train" in words else {}) | dict(env or {})
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def __call__(
        self, *words: str, module: str = "entrypoint", env: Mapping[str, str] | None = None
    ) -> Ended:
        return finish(self.start(*words, module=module, env=env))

    def train(self, *words: str, env: Mapping[str, str] | None = None) -> Ended:
        """Run a training that must succeed."""
        ended = self("train", *words, env=env)
        assert ended.code == 0, f"exit {ended.code}\n{ended.out}\n{ended.err}"
        return ended

    def entries(self, run: str, kind: str) -> list[dict[str, Any]]:
        """Return the run's entries of `kind` in metrics.jsonl, so far."""
        return logged(self.folder / "runs" / run, kind)


def finish(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate()
    return Ended(process.returncode, out, err)


def wait_until(condition: Callable[[], bool], process: Running) -> None:
    """Poll until `condition` is true; fail if the command ends first."""
    while not condition():
        if process.poll() is not None and not condition():
            ended = finish(process) if isinstance(process, subprocess.Popen) else process.wait()
            pytest.fail(f"the command ended too early: {ended}")
        time.sleep(0.02)


@pytest.fixture
def trainbox(tmp_path: Path) -> Iterator[Trainbox]:
    runner = Trainbox(tmp_path)
    yield runner
    for process in runner.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)  # its children ask the kernel to die with it
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
