"""Tasks with a known size of activations, weights or batches."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from trainbox import Task


def _images(count: int, size: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images_NCHW = torch.randn(count, 3, size, size, generator=generator)
    return TensorDataset(images_NCHW, images_NCHW.mean((1, 2, 3)))


class _Mean(nn.Module):
    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW.mean((1, 2, 3))


@dataclass(frozen=True)
class Wide(Task):
    """Convolutions with activations of about 14 MiB for each example, and few weights.

    On the CPU, `room` is the number of examples that fit in memory at once.
    """

    epochs: ClassVar[int] = 1
    batch_size: ClassVar[int] = 64
    learning_rate: ClassVar[float] = 1e-3

    size: int = 64
    channels: int = 64
    room: int = 0

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        return _images(256, self.size, 1)

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return _images(8, self.size, 2)

    def build_model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs in (3, *[self.channels] * 5):
            layers += [nn.Conv2d(inputs, self.channels, 3, padding=1), nn.GELU()]
        return nn.Sequential(*layers, _Mean())

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images_BCHW, targets_B = batch
        if self.room and len(images_BCHW) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return {"error": F.mse_loss(model(images_BCHW).float(), targets_B, reduction="none")}


@dataclass(frozen=True)
class Mislabelled(Task):
    """A classifier with 10 outputs, and the label 10 in a late batch, `every` so many examples."""

    epochs: ClassVar[int] = 1
    batch_size: ClassVar[int] = 8
    learning_rate: ClassVar[float] = 1e-3

    examples: int = 160
    every: int = 40

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        labels_N = torch.arange(self.examples) % 10
        labels_N[:: self.every] = 10
        return TensorDataset(torch.ones(self.examples, 4), labels_N)

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 10)

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_BK, labels_B = batch
        return {"loss": F.cross_entropy(model(inputs_BK), labels_B, reduction="none")}


@dataclass(frozen=True)
class Heavy(Task):
    """A perceptron of `layers` million weights, for checkpoints of 12 bytes for each weight."""

    epochs: ClassVar[int] = 1
    batch_size: ClassVar[int] = 32
    learning_rate: ClassVar[float] = 1e-4

    layers: int = 25

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        inputs_NK = torch.randn(2048, 1024, generator=generator)
        return TensorDataset(inputs_NK, inputs_NK.mean(1))

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return TensorDataset(*(t[:8] for t in self.train_dataset(data_dir).tensors))

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            *(module for _ in range(self.layers) for module in (nn.Linear(1024, 1024), nn.ReLU())),
            nn.Linear(1024, 1),
            nn.Flatten(0),
        )

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_BK, targets_B = batch
        return {"error": F.mse_loss(model(inputs_BK).float(), targets_B, reduction="none")}


class _Clips(Dataset[Any]):
    """Clips (3, 16, 64, 64) in float32, 0.75 MiB each, that cost a worker next to no time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3, 16, 64, 64), index / self.count), torch.tensor(index / self.count)


@dataclass(frozen=True)
class Clips(Task):
    """Batches of 48 MiB from loader workers, and a model that takes some milliseconds a step."""

    epochs: ClassVar[int] = 1
    batch_size: ClassVar[int] = 64
    learning_rate: ClassVar[float] = 1e-4

    examples: int = 2560
    width: int = 64

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return _Clips(self.examples)

    def validation_dataset(self, data_dir: Path) -> Dataset[Any]:
        return _Clips(8)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(3, self.width, 3, padding=1),
            nn.ReLU(),
            nn.Conv3d(self.width, self.width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(2),
        )

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        clips_BCTHW, targets_B = batch
        outputs_B = model(clips_BCTHW).float().mean((1, 2))
        return {"error": F.mse_loss(outputs_B, targets_B, reduction="none")}


class _Counter(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs_B4: Tensor) -> Tensor:
        output_B: Tensor = self.layer(inputs_B4).squeeze(1)
        return output_B


@dataclass(frozen=True)
class Hostile(Task):
    """A task whose step, replayed, would have other bits.

    Its factor is a draw of NumPy (`numpy`), a rare draw of Python (`rare`), a number that the host
    reads (`read`), or a buffer that is bound again in each step (`bound`).
    """

    epochs: ClassVar[int] = 1
    batch_size: ClassVar[int] = 8
    learning_rate: ClassVar[float] = 1e-3

    kind: str = "numpy"

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        inputs_N4 = torch.randn(1680, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs_N4, inputs_N4.mean(1))

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return TensorDataset(*(tensor[:8] for tensor in self.train_dataset(data_dir).tensors))

    def build_model(self) -> nn.Module:
        return _Counter()

    def losses(self, model: Any, batch: Any) -> dict[str, Tensor]:
        inputs_B4, targets_B = batch
        losses_B = F.mse_loss(model(inputs_B4).float(), targets_B, reduction="none")
        return {"error": losses_B * self._factor(model)}

    def _factor(self, model: Any) -> Any:
        if self.kind == "numpy":
            return float(numpy.random.random())
        if self.kind == "rare":
            return 2.0 if random.random() < 0.02 else 1.0  # noqa: S311 - not a secret
        if model.training and self.kind == "read":
            model.count += 1
            return 1 + float(model.count) / 1000
        if model.training:
            model.count = model.count + 1
        return 1 + model.count / 1000
