"""The fixture `check`: one check on the GPU, which runs commands and programs until its limit."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.machine import first_gpu, no_compiler, shared_memory_mib
from tests.gpu.program import read_results
from tests.support.commands import Ended, clean_environment
from tests.support.paths import ROOT

_SHOWN = 3000  # characters of a failed command's output


def limit_s(budget_s: float, device: str = "cuda") -> float:
    """Return the seconds after which a check is ended: enough for a machine of half the speed.

    A dry run may share its CPUs with other programs.
    """
    return max(60.0, 2 * budget_s) if device == "cuda" else 600.0


def environment(device: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a check's processes, made from `own`.

    The checkout is first on PYTHONPATH, because Trainbox may not be installed on this machine.
    """
    clean = {**clean_environment(), "CUDA_VISIBLE_DEVICES": ""}
    if device == "cuda":
        clean |= first_gpu(own)
    given = filter(None, own.get("PYTHONPATH", "").split(os.pathsep))
    # Absolute, because the processes run in folders of their own.
    path = [str(Path(folder).resolve()) for folder in (ROOT, *given)]
    return {**clean, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


@dataclass
class Check:
    """One check: its device, its folder, and what it has seen."""

    device: str
    folder: Path
    deadline_s: float  # of time.monotonic
    seen: list[str] = field(default_factory=list)
    tables: list[tuple[str, Sequence[str]]] = field(default_factory=list)
    _started: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def saw(self, text: str) -> None:
        """Add a value to the row of this check."""
        self.seen.append(text)

    def needs(self, *modules: str) -> None:
        """Skip the check if a module is missing."""
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            pytest.skip(f"this Python has no {', '.join(missing)}")

    def needs_training(self, *modules: str) -> None:
        """Skip the check if a module that trainings need is missing."""
        self.needs("sklearn", "tensorboard", "safetensors", "tqdm", *modules)

    def needs_compiler(self) -> None:
        """Skip the check if `torch.compile` cannot work."""
        if reason := no_compiler(self.device):
            pytest.skip(reason)

    def needs_shared_memory(self, mib: int) -> None:
        """Skip the check if batches of loader workers do not fit in /dev/shm."""
        if (free := shared_memory_mib()) < mib:
            pytest.skip(f"/dev/shm has {free} MiB, and the loader workers need {mib} MiB")

    def needs_gpu(self) -> None:
        """Skip the rest of the check in a dry run on the CPU."""
        if not self.on_gpu:
            pytest.skip("a dry run on the CPU stops here")

    def start(
        self, *argv: str, env: Mapping[str, str] | None = None, name: str = "command"
    ) -> "subprocess.Popen[str]":
        """Start `python -P ARGV`; its output goes to files of `folder`, so that it cannot block."""
        number = len(self._started)
        with (
            (self.folder / f"{number}-{name}.out").open("w") as out,
            (self.folder / f"{number}-{name}.err").open("w") as err,
        ):
            process = subprocess.Popen(
                [sys.executable, "-P", *argv],
                cwd=self.folder,
                env=environment(self.device, os.environ) | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,  # the whole group is ended
            )
        process.files = (Path(out.name), Path(err.name))  # type: ignore[attr-defined]
        self._started.append(process)
        return process

    def finish(self, process: "subprocess.Popen[str]", codes: Sequence[int] = (0,)) -> Ended:
        """Wait for a command, which must exit with one of `codes` before the check's limit."""
        try:
            process.wait(max(0.1, self.deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._end(process)
            pytest.fail(f"no end before the limit: {self._shown(process)}", pytrace=False)
        out, err = (path.read_text(errors="replace") for path in process.files)  # type: ignore[attr-defined]
        if process.returncode not in codes:
            pytest.fail(f"exit code {process.returncode}: {self._shown(process)}", pytrace=False)
        return Ended(process.returncode, out, err)

    def trainbox(self, *words: str, codes: Sequence[int] = (0,), **options: Any) -> Ended:
        """Run `trainbox ARGUMENTS`."""
        return self.finish(self.start_trainbox(*words, **options), codes)

    def start_trainbox(self, *words: str, **options: Any) -> "subprocess.Popen[str]":
        self.needs("click", "pynvml")
        return self.start("-m", "entrypoint", *words, name=words[0], **options)

    def train(self, run: str, *words: str, **options: Any) -> Path:
        """Run `trainbox train ARGUMENTS` as the run `run`, and return its folder."""
        self.trainbox(*self.training(run, *words), **options)
        return self.folder / "runs" / run

    def training(self, run: str, *words: str) -> list[str]:
        """Return the arguments of a training; the checks of the health gate are separate."""
        return ["train", *words, "--device", self.device, "--run", run, "--no-health"]

    def start_program(
        self, module: str, env: Mapping[str, str] | None = None, **arguments: Any
    ) -> "subprocess.Popen[str]":
        """Start `measure` of tests/gpu/programs/`module`.py; `results` returns what it yields."""
        results = self.folder / f"{module}-{len(self._started)}.jsonl"
        process = self.start(
            *("-m", "tests.gpu.program", f"tests.gpu.programs.{module}"),
            *(json.dumps({"device": self.device, **arguments}), str(results)),
            env=env,
            name=module,
        )
        process.results = results  # type: ignore[attr-defined]
        return process

    def results(self, process: "subprocess.Popen[str]", codes: Sequence[int] = (0,)) -> Any:
        """Return the values of a program by name, at its end."""
        self.finish(process, codes)
        return read_results(process.results)  # type: ignore[attr-defined]

    def program(self, module: str, **arguments: Any) -> dict[str, Any]:
        """Run a program to its end and return its values by name."""
        found: dict[str, Any] = self.results(self.start_program(module, **arguments))
        return found

    def close(self) -> None:
        """End all processes of this check."""
        for process in self._started:
            self._end(process)

    def _end(self, process: "subprocess.Popen[str]") -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _shown(self, process: "subprocess.Popen[str]") -> str:
        out, err = (path.read_text(errors="replace") for path in process.files)  # type: ignore[attr-defined]
        last = next((line for line in reversed(err.splitlines()) if line.strip()), "")
        command = " ".join(map(str, process.args[2:]))  # type: ignore[index, arg-type]
        return f"{last}\n{command}\n{out[-_SHOWN:]}\n{err[-_SHOWN:]}"


def errors(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the errors among a program's values."""
    return {
        name: value["error"]
        for name, value in values.items()
        if isinstance(value, dict) and "error" in value
    }
