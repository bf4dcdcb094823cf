"""A task whose trials go wrong as their seed and the files in the working folder say."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.utils.data import TensorDataset

from tests.trainer.tiny import Tiny
from trainbox import WrongUse


@dataclass(frozen=True)
class Brittle(Tiny):
    """Tiny, and: each process that trains leaves a line in `trained`; every tenth one is killed when it first begins."""

    width: int = 4
    dies: bool = False
    fails: str = ""
    bad: bool = False
    waits: bool = False
    leaves: bool = False
    tells: bool = False

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        if self.bad:
            raise WrongUse("no readings: put them there")
        return super().train_dataset(data_dir)

    def build_model(self) -> nn.Module:
        if self.waits and Path("gate").exists():
            Path("at the gate").touch()
            Path("gate").read_bytes()  # a FIFO: until the test opens it
        with Path("trained").open("a") as log:
            log.write(f"{os.getpid()}\n")
        if self.leaves:
            child = subprocess.Popen(["sleep", "600"], close_fds=False)
            Path("child").write_text(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        gpu = os.environ["CUDA_VISIBLE_DEVICES"]
        if self.tells:
            with Path("seen").open("a") as log:
                log.write(f"{os.getpid()} {gpu}\n")
        if self.fails.startswith("on "):
            if self.fails.endswith(gpu):
                raise RuntimeError(self.fails)
        elif self.fails not in ("", "no"):
            raise RuntimeError(self.fails)
        if self.dies and len(Path("trained").read_text().split()) % 10 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build_model()


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
