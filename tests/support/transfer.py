"""A small classifier with batch norm, whose last layer depends on the number of classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainbox import Classification

TRANSFER = f"{Path(__file__)}:Transfer"


class _Net(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, points_B4: Tensor) -> Tensor:
        logits_BK: Tensor = self.head(self.body(points_B4))
        return logits_BK


@dataclass(frozen=True)
class Transfer(Classification):
    """Points in four dimensions, in `classes` classes. An epoch has 6 steps of 8 examples."""

    epochs: ClassVar[int] = 1
    batch_size: ClassVar[int] = 8
    learning_rate: ClassVar[float] = 0.05

    classes: int = 3
    width: int = 6

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(map(str, range(self.classes)))

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        return self._points(50, 1)

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return self._points(20, 2)

    def build_model(self) -> nn.Module:
        return _Net(self.width, self.classes)

    def _points(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        points_N4 = torch.randn(count, 4, generator=generator)
        return TensorDataset(points_N4, torch.arange(count) % self.classes)
