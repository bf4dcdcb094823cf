"""Tasks whose trials fail in chosen ways.

`Brittle` and `Exits` derive from Task itself, so that their fields are read without an import.
"""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.support.tiny import Tiny
from trainbox import Task, WrongUse

HELD_STEP = 4  # where `holds` waits, of six steps an epoch


@dataclass(frozen=True)
class Trivial(Task):
    """The task Tiny, with one epoch of six steps."""

    epochs: ClassVar[int] = 1
    batch_size: ClassVar[int] = 8
    learning_rate: ClassVar[float] = 0.05

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return Tiny().train_dataset(data_dir)

    def validation_dataset(self, data_dir: Path) -> Dataset[Any]:
        return Tiny().validation_dataset(data_dir)

    def build_model(self) -> nn.Module:
        return Tiny().build_model()

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return Tiny().losses(model, batch)


@dataclass(frozen=True)
class Brittle(Trivial):
    """Writes its process id to the file `trained` at each start of a training.

    dies: every Nth trial kills its process at its first start; 0 for none.
    fails: any text but "no" raises a RuntimeError with that text.
    bad: reports missing data.
    waits: a training waits at its start while the file `gate` exists.
    holds: a training waits in step HELD_STEP for the request to stop, while the file `hold` exists.
    leaves: kills its process and leaves a child that holds its open files.
    shows: writes the visible GPU to the file `seen`.
    cramped: torch counts a failed allocation of GPU memory.
    """

    width: int = 4
    dies: int = 0
    fails: str = "no"
    bad: bool = False
    waits: bool = False
    holds: bool = False
    leaves: bool = False
    shows: bool = False
    cramped: bool = False

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        if self.bad:
            raise WrongUse("no readings: put them there")
        return super().train_dataset(data_dir)

    def build_model(self) -> nn.Module:
        if self.waits:
            _log("at the gate")
            while Path("gate").exists():
                time.sleep(0.01)
        _log("trained")
        if self.leaves:
            child = subprocess.Popen(["sleep", "600"], close_fds=False)
            Path("child").write_text(str(child.pid), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.shows:
            _log("seen", os.environ["CUDA_VISIBLE_DEVICES"])
        if self.cramped:
            torch.cuda.is_initialized, torch.cuda.device_count = lambda: True, lambda: 1
            torch.cuda.memory_stats = lambda *_: {"num_ooms": 1}
            torch.cuda.empty_cache = lambda: None
        if self.fails != "no":
            raise RuntimeError(self.fails)
        if self.dies and _trial() % self.dies == self.dies - 1:
            died = Path(f"died {_trial()}")
            if not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().build_model()

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        losses = super().losses(model, batch)
        if self.holds and model.training and int(model.forwards) >= HELD_STEP:
            handler: Any = signal.getsignal(signal.SIGTERM)  # a method of the StopRequest
            while Path("hold").exists() and not handler.__self__:
                time.sleep(0.01)
        return losses


def _log(file: str, *texts: str) -> None:
    """Append one line with the process id; several processes may write."""
    with Path(file).open("a", encoding="utf-8") as log:
        log.write(f"{' '.join([str(os.getpid()), *texts])}\n")


def _trial() -> int:
    """Return the number of the trial, from the name of the log that is standard output."""
    match = re.search(r"/trial-(\d+)/", os.readlink("/proc/self/fd/1"))  # noqa: PTH115
    assert match
    return int(match[1])


@dataclass(frozen=True)
class Exits(Trivial):
    """Ends its process: `how` is "abort", the argument of sys.exit, or "no"."""

    how: str = "no"

    def build_model(self) -> nn.Module:
        if self.how == "abort":
            os.write(2, b"terminate called\n  what():  no such kernel\n")
            os.abort()
        if self.how != "no":
            sys.exit(int(self.how))
        return super().build_model()
