"""Classify the 1,797 handwritten 8x8 digits of scikit-learn, without a download."""

import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainbox import Classification
from trainer.tasks.reading.fields import FROM_0_BELOW_1, FROM_1, check_fields

# Shape suffixes: N examples, B examples of a batch, C channels, H height, W width.

_VALIDATION_EXAMPLES = 360


@dataclass(frozen=True)
class Digits(Classification):
    """8x8 handwritten digits, offline: 1,437 to train, 360 to validate."""

    epochs: ClassVar[int] = 20
    batch_size: ClassVar[int] = 64
    learning_rate: ClassVar[float] = 3e-3
    class_names: ClassVar[tuple[str, ...]] = tuple("0123456789")

    width: int = 32
    dropout: float = 0.25

    def __post_init__(self) -> None:
        check_fields(self, FROM_1, "width")
        check_fields(self, FROM_0_BELOW_1, "dropout")

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        images_NCHW, labels_N = _load()
        return TensorDataset(images_NCHW[_VALIDATION_EXAMPLES:], labels_N[_VALIDATION_EXAMPLES:])

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        images_NCHW, labels_N = _load()
        return TensorDataset(images_NCHW[:_VALIDATION_EXAMPLES], labels_N[:_VALIDATION_EXAMPLES])

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(self.dropout),
            nn.Flatten(),
            nn.Linear(2 * self.width * 4 * 4, 128),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(128, 10),
        )

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor]:
        images_BCHW, labels_B = batch
        return images_BCHW.float() / 16, labels_B


def _load() -> tuple[Tensor, Tensor]:
    """Return images (1797, 1, 8, 8) uint8 from 0 to 16 and labels (1797,) int64.

    The order is shuffled, but always the same. The file is read from scikit-learn's folder. An
    import of scikit-learn would take a second.
    """
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.origin is not None
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz") as file:
        table = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.uint8))
    # The file is sorted by writer. Both parts must have all writers.
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :64].reshape(-1, 1, 8, 8), table[:, 64].long()
