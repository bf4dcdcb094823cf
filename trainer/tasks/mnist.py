"""MNIST: 70,000 handwritten 28x28 digits, and the two-convolution CNN of the classic PyTorch
example.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from trainbox import Classification, WrongUse

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

    Without `in_memory` each example is read by a loader worker, as courses do who compare numbers
    of them.
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
        """torchvision's own files under `data_dir`, downloaded with their checksums where they are
        missing.
        """
        from torchvision import datasets

        loader = getattr(datasets, self.torchvision_name)
        try:
            loaded = loader(data_dir, train=train, download=True)
            tensors = TensorDataset(loaded.data.unsqueeze(1), loaded.targets.long())
            return tensors if self.in_memory else Subset(tensors, range(len(tensors)))
        # torchvision gives RuntimeError when each mirror failed, and these others for files that
        # are cut short
        except (OSError, RuntimeError, ValueError, AssertionError) as error:
            folder = data_dir / self.torchvision_name / "raw"
            missing = [name for name in _FILES if not (folder / name).is_file()]
            if not missing:
                raise WrongUse(
                    f"{folder} holds a damaged file ({error}): delete the folder, or put "
                    "whole files there"
                ) from error
            raise WrongUse(
                f"{self.torchvision_name} is not in {folder} and cannot be downloaded "
                f"({str(error).splitlines()[0]}): "
                f"put these files there, as they are or with .gz: {', '.join(missing)}"
            ) from error
