"""Classify augmented handwritten digits with loader workers, batch norm and dropout.

These are the parts of a training in which random numbers and running averages could go wrong.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer.tasks.digits import Digits
from trainer.tasks.reading.fields import FROM_0, check_fields

# Shape suffixes: N examples, C channels, H height, W width.


@dataclass(frozen=True)
class DigitsAugmented(Digits):
    """8x8 digits with random shifts in loader workers, batch norm and dropout, offline."""

    shift: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, FROM_0, "shift")

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:  # type: ignore[override]
        images_NCHW, labels_N = super().train_dataset(data_dir).tensors
        return _Shifted(images_NCHW, labels_N, self.shift)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, padding=1),
            nn.BatchNorm2d(self.width),
            nn.ReLU(),
            nn.Conv2d(self.width, self.width, 3, padding=1),
            nn.BatchNorm2d(self.width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(16 * self.width, 10),
        )


class _Shifted(Dataset[Any]):
    """A dataset of (image (1, 8, 8), label) in which images are moved by up to `shift` pixels.

    The loader seeds torch's generator before each example.
    """

    def __init__(self, images_NCHW: Tensor, labels_N: Tensor, shift: int) -> None:
        self.images_NCHW, self.labels_N, self.shift = images_NCHW, labels_N, shift

    def __len__(self) -> int:
        return len(self.images_NCHW)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-self.shift, self.shift + 1, (2,)).tolist()
        return self.images_NCHW[index].roll((down, right), (1, 2)), self.labels_N[index]
