"""Tasks that train in milliseconds, for trainings inside the test's own process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from trainbox import Task

TINY = "tests.support.tiny:Tiny"
TEXTS = "tests.support.tiny:Texts"


class StepCounter(nn.Module):
    """A linear model that counts its training forwards, so that a test can choose one of them."""

    forwards: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        output: Tensor = self.linear(inputs_B4).squeeze(1)
        return output


class ActNorm(StepCounter):
    """A model whose first forward sets a parameter from the data.

    A buffer, or an `attribute`, has whether this was done.
    """

    def __init__(self, attribute: bool = False) -> None:
        super().__init__()
        self.factor_4 = nn.Parameter(torch.ones(4))
        if attribute:
            self.ready = False
        else:
            self.register_buffer("ready", torch.tensor(False))

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if not self.ready:
            self.factor_4.data.copy_(1 / inputs_B4.std(0))
            self.ready = self.ready | True
        return super().forward(inputs_B4 * self.factor_4)


@dataclass(frozen=True)
class Tiny(Task):
    """A linear regression of four inputs, with 50 training and 20 validation examples.

    An epoch has 6 steps of 8 examples.
    """

    epochs: ClassVar[int] = 3
    batch_size: ClassVar[int] = 8
    learning_rate: ClassVar[float] = 0.05

    nan_at: int = 0
    noise: float = 0.1

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        return self._examples(50, 1)

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return self._examples(20, 2)

    def build_model(self) -> nn.Module:
        return StepCounter()

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_B4, targets_B = batch
        losses_B = F.mse_loss(model(inputs_B4), targets_B, reduction="none")
        assert isinstance(model, StepCounter)
        if model.training and self.nan_at and int(model.forwards) >= self.nan_at:
            losses_B = losses_B * torch.nan
        return {"squared_error": losses_B}

    def _examples(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        inputs_N4 = torch.randn(count, 4, generator=generator)
        targets_N = inputs_N4 @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + self.noise * torch.randn(
            count, generator=generator
        )
        return TensorDataset(inputs_N4, targets_N)


@dataclass(frozen=True)
class SetByData(Tiny):
    """Sets a parameter from the first examples of each process."""

    def build_model(self) -> nn.Module:
        return ActNorm()


@dataclass(frozen=True)
class Texts(Tiny):
    """A task with fields that are texts."""

    url: str = ""
    api_key: str = ""
    note: str = ""


@dataclass(frozen=True)
class NumpyMetrics(Tiny):
    """Returns its metrics as NumPy floats, as scikit-learn computes them."""

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        return {"loss": numpy.float64(float(totals["loss"] / totals["examples"]))}


@dataclass(frozen=True)
class Sized(Tiny):
    """Reads the number of inputs from its data, and notes the shapes."""

    inputs: int = 0

    def with_data(self, data_dir: Path) -> Self:
        return replace(self, inputs=int((data_dir / "inputs.txt").read_text()))

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        return self._sized(50)

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return self._sized(20)

    def notes(self, train: Dataset[Any], validation: Dataset[Any]) -> dict[str, str]:
        shapes = [
            list(dataset.tensors[0].shape)
            for dataset in (train, validation)
            if isinstance(dataset, TensorDataset)
        ]
        return {"shapes": f"{shapes}"}

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.inputs, 1), nn.Flatten(0))

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_BN, targets_B = batch
        return {"squared_error": F.mse_loss(model(inputs_BN), targets_B, reduction="none")}

    def _sized(self, count: int) -> TensorDataset:
        return TensorDataset(torch.ones(count, self.inputs), torch.zeros(count))


@dataclass(frozen=True)
class Large(Tiny):
    """Beginning with training forward `first`, has memory for `ROOM` examples at once.

    `ROOM` is a variable of the environment.
    """

    first: int = 1
    norm: bool = False

    def build_model(self) -> nn.Module:
        model = StepCounter()
        if self.norm:
            model.linear = nn.Sequential(nn.BatchNorm1d(4), model.linear)  # type: ignore[assignment]
        return model

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        losses = super().losses(model, batch)
        assert isinstance(model, StepCounter)
        if (
            model.training
            and int(model.forwards) >= self.first
            and len(batch[0]) > int(os.environ.get("ROOM", "99"))
        ):
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it."
            )
        return losses


@dataclass(frozen=True)
class FigureCount(Tiny):
    """Has two losses, and a statistic that is a table."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        losses_B = super().losses(model, batch)["squared_error"]
        return {"squared_error": losses_B, "tenth": losses_B / 10}

    def statistics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_B4, targets_B = batch
        return {
            "loss": F.mse_loss(model(inputs_B4), targets_B, reduction="sum"),
            "sums": inputs_B4.sum(0),
        }

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        return {"loss": float(totals["loss"] / totals["examples"])}


@dataclass(frozen=True)
class Split(Tiny):
    """Splits 80 examples at random, from the generator that is seeded before each dataset.

    The file `shift` in the data folder holds a number that is added to the targets.
    """

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        return self._part(data_dir, slice(50))

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return self._part(data_dir, slice(50, 70))

    def test_dataset(self, data_dir: Path) -> TensorDataset:
        return self._part(data_dir, slice(70, 80))

    def _part(self, data_dir: Path, part: slice) -> TensorDataset:
        inputs_N4, targets_N = self._examples(80, 3).tensors
        chosen_N = torch.randperm(80)[part]
        shift = float((data_dir / "shift").read_text())
        return TensorDataset(inputs_N4[chosen_N], targets_N[chosen_N] + shift)


class _Named(TensorDataset):
    """Examples with names."""

    @property
    def ids(self) -> list[str]:
        return [f"example {i}" for i in range(len(self))]


@dataclass(frozen=True)
class Predicting(Tiny):
    """Predicts floats, a table and booleans."""

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return _Named(*super().validation_dataset(data_dir).tensors)

    def predictions(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_B4, targets_B = batch
        outputs_B = model(inputs_B4)
        return {
            "target": targets_B,
            "output": outputs_B,
            "inputs": inputs_B4,
            "large": outputs_B.abs() > 1,
        }


@dataclass(frozen=True)
class ScalarPrediction(Tiny):
    """Returns one prediction for the whole batch."""

    def predictions(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"mean": model(batch[0]).mean()}


@dataclass(frozen=True)
class FewIds(Predicting):
    """Has names for only some of the examples."""

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        dataset = Tiny().validation_dataset(data_dir)
        dataset.ids = ["a", "b", "c"]  # type: ignore[attr-defined]
        return dataset


@dataclass(frozen=True)
class FromFiles(Tiny):
    """Predicts files with four numbers and, for a validation, a target."""

    example_endings: ClassVar[tuple[str, ...]] = (".txt",)

    def load_example(self, path: Path) -> tuple[Tensor, float]:
        print(f"reading {path}")
        return torch.tensor([float(number) for number in path.read_text().split()]), 0.0

    def predictions(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_B4, targets_B = batch
        outputs_B = model(inputs_B4)
        return {"truth": targets_B, "output": outputs_B, "scaled": outputs_B[:, None] / inputs_B4}
