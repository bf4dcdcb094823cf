"""Tasks for the tests of faults, named on the command line by the path of this file."""

import itertools
import json
import os
import re
import resource
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from trainbox import Task

_EXAMPLES = 650  # 40 steps of 16 an epoch


def _wait_at(gate: Path) -> None:
    """If a test has made this FIFO, wait until the test has opened and closed it."""
    if gate.exists():
        gate.read_bytes()


def _wait_for_a_signal_at(gate: Path) -> None:
    """If a test has made this FIFO, wait until the test opens it and this process gets a signal."""
    if not gate.exists():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    with gate.open("rb"):
        while os.read(reader, 1)[0] == signal.SIGCHLD:
            pass
    signal.set_wakeup_fd(before)


class CountingNet(nn.Module):
    """A model with dropout and batch norm that counts its training forwards."""

    forwards: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(width, width),
            nn.Linear(width, 1),
        )
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs_B8: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        output: Tensor = self.layers(inputs_B8).squeeze(1)
        return output


@dataclass(frozen=True)
class Gated(Task):
    """A task whose ranks wait where a test wants to inject a fault.

    Each rank waits in its step N while the FIFO `gate-RANK-N` is in the working folder, in step 0
    before it reads the data. At the FIFO `signal-RANK-N` it waits for a signal.
    """

    epochs: ClassVar[int] = 10
    batch_size: ClassVar[int] = 16

    width: int = 64

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        _wait_at(Path(f"gate-{os.environ.get('RANK', '0')}-0"))
        Path("data was read").touch()
        return TensorDataset(*self._rows(_EXAMPLES, 1))

    def validation_dataset(self, data_dir: Path) -> Dataset[Any]:
        return TensorDataset(*self._rows(50, 2))

    def build_model(self) -> nn.Module:
        return CountingNet(self.width)

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_B8, targets_B, _ids_B = batch
        losses_B = (model(inputs_B8) - targets_B).square()
        assert isinstance(model, CountingNet)
        if model.training:
            self.at_step(int(model.forwards), batch)
        return {"error": losses_B}

    def at_step(self, step: int, batch: Any) -> None:
        rank = os.environ.get("RANK", "0")
        _wait_at(Path(f"gate-{rank}-{step}"))
        _wait_for_a_signal_at(Path(f"signal-{rank}-{step}"))

    def _rows(self, count: int, seed: int) -> tuple[Tensor, ...]:
        inputs_N8 = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
        return inputs_N8, inputs_N8.sin().sum(1), torch.arange(count)


@dataclass(frozen=True)
class HeldInSaves(Gated):
    """A task that waits in a save while the FIFO `gate-0-save` exists.

    It counts calls of fsync while a temporary file exists, and waits in number HELD_FSYNC.
    """

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        held, calls, fsync = int(os.environ.get("HELD_FSYNC", "0")), itertools.count(1), os.fsync

        def fsync_at_the_gate(descriptor: int) -> None:
            if any(Path("runs").rglob("*.tmp")) and next(calls) == held:
                _wait_at(Path("gate-0-save"))
            fsync(descriptor)

        os.fsync = fsync_at_the_gate
        return super().train_dataset(data_dir)


@dataclass(frozen=True)
class Hungry(Gated):
    """Allocates 16 GB more in step 50."""

    def at_step(self, step: int, batch: Any) -> None:
        super().at_step(step, batch)
        if step == 50:
            torch.zeros(4 * 2**30)


@dataclass(frozen=True)
class Cramped(Gated):
    """From step `first` on, needs 256 MiB for each example on rank 1 or on a single process.

    This process may allocate addresses for at most 12 such examples.
    """

    first: int = 1

    def at_step(self, step: int, batch: Any) -> None:
        if os.environ.get("RANK", "1") == "1":
            if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
                size_kib = re.search(
                    r"^VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
                )
                assert size_kib
                resource.setrlimit(
                    resource.RLIMIT_AS,
                    ((int(size_kib[1]) * 2**10 + 12 * 2**28), resource.RLIM_INFINITY),
                )
            if step >= self.first:
                torch.empty(len(batch[0]), 2**28, dtype=torch.uint8)


class _Rows(Dataset[Any]):
    """A dataset for loader workers; example 640 waits while the FIFO `gate-example` exists."""

    def __init__(self, *tensors: Tensor, padding: int) -> None:
        self.tensors, self.padding = tensors, padding

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == 640:
            _wait_at(Path("gate-example"))
        return *(tensor[index] for tensor in self.tensors), torch.zeros(self.padding)


@dataclass(frozen=True)
class Loaded(Gated):
    """Reads its examples in loader workers, each with `padding` unused numbers."""

    padding: int = 0

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return _Rows(*self._rows(_EXAMPLES, 1), padding=self.padding)

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return super().losses(model, batch[:3])


@dataclass(frozen=True)
class Audited(Loaded):
    """Writes the examples of each step to the file `seen-RANK.jsonl`."""

    def at_step(self, step: int, batch: Any) -> None:
        super().at_step(step, batch)
        with Path(f"seen-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
            file.write(json.dumps(batch[2].tolist()) + "\n")


@dataclass(frozen=True)
class Sick(Gated):
    """Multiplies the loss of one example by `factor` in the steps from `first` to `last`.

    The example is one of rank 1, or of a single process.
    """

    first: int = 50
    last: int = 50
    factor: float = float("nan")

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        losses_B = super().losses(model, batch)["error"]
        assert isinstance(model, CountingNet)
        if (
            model.training
            and self.first <= int(model.forwards) <= self.last
            and os.environ.get("RANK", "1") == "1"
        ):
            losses_B = losses_B * torch.tensor([self.factor, *[1.0] * (len(losses_B) - 1)])
        return {"error": losses_B}


@dataclass(frozen=True)
class Empty(Gated):
    """A task whose training set is empty."""

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return TensorDataset(*self._rows(0, 1))
