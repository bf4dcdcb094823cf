"""A task whose trials go wrong as their seed and the files in the working folder say."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.support.tiny import Tiny
from trainbox import WrongUse


@dataclass(frozen=True)
class Brittle(Tiny):
    """Tiny, which leaves a line with its process in the file `trained` at each start of a training.

    With `dies`, each tenth trial is killed at its first start. With `waits`, a training waits at
    its start while there is a file `gate`. With `holds`, it waits in its 20th step for the wish to
    stop, while there is a file `hold`.
    """

    width: int = 4
    dies: bool = False
    fails: str = ""
    bad: bool = False
    waits: bool = False
    holds: bool = False
    leaves: bool = False
    tells: bool = False

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        if self.bad:
            raise WrongUse("no readings: put them there")
        return super().train_dataset(data_dir)

    def build_model(self) -> nn.Module:
        if self.waits:
            _note("at the gate")
            while Path("gate").exists():
                time.sleep(0.01)
        _note("trained")
        if self.leaves:
            child = subprocess.Popen(["sleep", "600"], close_fds=False)
            Path("child").write_text(str(child.pid), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
        gpu = os.environ["CUDA_VISIBLE_DEVICES"]
        if self.tells:
            _note("seen", gpu)
        if self.fails.startswith("on "):
            if self.fails.endswith(gpu):
                raise RuntimeError(self.fails)
        elif self.fails not in ("", "no"):
            raise RuntimeError(self.fails)
        if self.dies and _trial() % 10 == 9 and not (died := Path(f"died {_trial()}")).exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build_model()

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        losses = super().losses(model, batch)
        if self.holds and model.training and int(model.forwards) >= 20:
            note = signal.getsignal(signal.SIGTERM)
            while Path("hold").exists() and not note.__self__:  # type: ignore[union-attr]
                time.sleep(0.01)
        return losses


def _note(file: str, *words: str) -> None:
    """One line, whole, whoever else writes there."""
    with Path(file).open("a", encoding="utf-8") as log:
        log.write(f"{' '.join([str(os.getpid()), *words])}\n")


def _trial() -> int:
    """The number of the trial, by whose log the output goes to."""
    match = re.search(r"/trial-(\d+)/", os.readlink("/proc/self/fd/1"))  # noqa: PTH115
    assert match
    return int(match[1])


@dataclass(frozen=True)
class Exits(Tiny):
    """Ends its process in the middle: "abort", or sys.exit with the number in `how`."""

    how: str = "no"

    def build_model(self) -> nn.Module:
        if self.how == "abort":
            os.write(2, b"terminate called\n  what():  no such kernel\n")
            os.abort()
        if self.how != "no":
            sys.exit(int(self.how))
        return super().build_model()
