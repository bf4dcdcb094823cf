"""Tasks for trainings on several processes, named on the command line by this file's path."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from tests.support.fault_tasks import Gated
from trainbox import Task

_VALIDATION_EXAMPLES = 257  # prime: no number of processes or batches divides it


class Rows(Dataset[Any]):
    """A dataset of the rows of tensors, which a loader reads one by one."""

    def __init__(self, *tensors: Tensor, noise: float = 0.0) -> None:
        self.tensors, self.noise = tensors, noise

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        first, *others = (tensor[index] for tensor in self.tensors)
        return (first + self.noise * torch.randn(first.shape) if self.noise else first), *others


@dataclass(frozen=True)
class Census(Task):
    """Counts how often each validation example is seen, and adds up their numbers."""

    epochs: ClassVar[int] = 2
    batch_size: ClassVar[int] = 64

    loaded: bool = False

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self._rows(130)

    def validation_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self._rows(_VALIDATION_EXAMPLES)

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        (ids_B,) = batch
        return {"error": (model(ids_B[:, None].float() / 100).squeeze(1) - 1).square()}

    def statistics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        (ids_B,) = batch
        seen = F.one_hot(ids_B, _VALIDATION_EXAMPLES).sum(0)
        return {"loss": self.losses(model, batch)["error"].sum(), "ids": ids_B.sum(), "seen": seen}

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        return {
            "loss": float(totals["loss"] / totals["examples"]),
            "ids": float(totals["ids"]),
            "count": float(totals["examples"]),
        }

    def _rows(self, count: int) -> Dataset[Any]:
        return Rows(torch.arange(count)) if self.loaded else TensorDataset(torch.arange(count))


@dataclass(frozen=True)
class Shaky(Gated):
    """A task with augmentation in loader workers, batch norm and dropout.

    An epoch has 40 steps of 16 examples, at which a test can hold the ranks.
    """

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return Rows(*self._rows(650, 1), noise=0.5)

    def validation_dataset(self, data_dir: Path) -> Dataset[Any]:
        return Rows(*self._rows(50, 2), noise=0.5)


class _WithAHole(Rows):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == 600 and Path("broken").exists():
            raise ValueError(f"recording {index} is broken")
        return super().__getitem__(index)


@dataclass(frozen=True)
class Holey(Shaky):
    """A task with an example that cannot be read if the file `broken` exists."""

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return _WithAHole(*self._rows(650, 1))


@dataclass(frozen=True)
class Alone(Census):
    """A task with a mistake on rank 1 alone; the message of this rank must be printed."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        losses_B = super().losses(model, batch)["error"]
        return {"error": losses_B.mean() if torch.distributed.get_rank() == 1 else losses_B}
