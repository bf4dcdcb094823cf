"""Tasks with convolutions of pictures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainbox import Task


class _Net(nn.Module):
    def __init__(self, views: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * 36, 1)
        self.views = views

    def forward(self, pictures_B3HW: Tensor) -> Tensor:
        features = self.second(self.norm(self.first(pictures_B3HW)).relu()).relu()
        flat = features.view(len(features), -1) if self.views else features.flatten(1)
        output: Tensor = self.last(flat).squeeze(1)
        return output


@dataclass(frozen=True)
class Pictures(Task):
    """A regression of small pictures.

    With `views`, the model needs contiguous pictures.
    """

    epochs: ClassVar[int] = 3
    batch_size: ClassVar[int] = 8

    views: bool = False

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        return _pictures(32, 1)

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return _pictures(8, 2)

    def build_model(self) -> nn.Module:
        return _Net(self.views)

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        pictures_B3HW, targets_B = batch
        return {"error": F.mse_loss(model(pictures_B3HW).float(), targets_B, reduction="none")}


def _pictures(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    pictures_N3HW = torch.randn(count, 3, 6, 6, generator=generator)
    return TensorDataset(pictures_N3HW, pictures_N3HW.mean((1, 2, 3)))
