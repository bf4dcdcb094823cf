"""Classify the 70,000 handwritten digits of MNIST with the CNN of PyTorch's MNIST example."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from trainbox import Classification, WrongUse
from trainer.tasks.reading.download import answering, cause
from trainer.tasks.reading.fields import FROM_0_BELOW_1, FROM_1, check_fields

# Shape suffixes: N examples, B examples of a batch, C channels, H height, W width.

_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True)
class Mnist(Classification):
    """28x28 handwritten digits: 60,000 to train, 10,000 to validate; downloaded once.

    If `in_memory` is false, loader workers read the examples one by one. This is for comparing
    numbers of workers.
    """

    epochs: ClassVar[int] = 10
    batch_size: ClassVar[int] = 128
    learning_rate: ClassVar[float] = 1e-3
    class_names: ClassVar[tuple[str, ...]] = tuple("0123456789")
    torchvision_name: ClassVar[str] = "MNIST"
    mean: ClassVar[float] = 0.1307
    std: ClassVar[float] = 0.3081

    width: int = 32
    hidden: int = 128
    dropout: float = 0.25
    in_memory: bool = True

    def __post_init__(self) -> None:
        check_fields(self, FROM_1, "width", "hidden")
        check_fields(self, FROM_0_BELOW_1, "dropout")

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self._load(data_dir, train=True)

    def validation_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self._load(data_dir, train=False)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3),
            nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(self.dropout),
            nn.Flatten(),
            nn.Linear(2 * self.width * 12 * 12, self.hidden),
            nn.ReLU(),
            nn.Dropout(2 * self.dropout),
            nn.Linear(self.hidden, 10),
        )

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor]:
        images_BCHW, labels_B = batch
        return (images_BCHW.float() / 255 - self.mean) / self.std, labels_B

    def _load(self, data_dir: Path, train: bool) -> Dataset[Any]:
        """Return one part of the dataset from torchvision's files in `data_dir`.

        Missing files are downloaded and checked.

        Raises:
            WrongUse: a file is damaged, or missing and cannot be downloaded.
        """
        from torchvision import datasets

        loader = getattr(datasets, self.torchvision_name)
        try:
            with answering():
                loaded = loader(data_dir, train=train, download=True)
            tensors = TensorDataset(loaded.data.unsqueeze(1), loaded.targets.long())
            return tensors if self.in_memory else Subset(tensors, range(len(tensors)))
        # torchvision raises RuntimeError if all mirrors fail, and the other types for files that
        # are cut off.
        except (OSError, RuntimeError, ValueError, AssertionError) as error:
            folder = data_dir / self.torchvision_name / "raw"
            missing = [name for name in _FILES if not (folder / name).is_file()]
            if not missing:
                raise WrongUse(
                    f"{folder} has a damaged file ({error}): delete the folder, so that it is "
                    "downloaded again"
                ) from error
            raise WrongUse(
                f"{self.torchvision_name} is not in {folder} and cannot be downloaded "
                f"({cause(error)}): put these files there, with or without .gz: "
                f"{', '.join(missing)}"
            ) from error
