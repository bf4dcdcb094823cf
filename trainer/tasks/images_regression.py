"""Predict a number for each picture with a model of torchvision."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from trainbox import WrongUse, metrics, pictures
from trainer.tasks.imaging.models import Scaled
from trainer.tasks.imaging.parts import TRAIN, Picture
from trainer.tasks.imaging.picture_task import PictureTask
from trainer.tasks.reading.fields import FROM_0, check_fields

# Shape suffixes: B pictures of a batch, N pictures of a data set.

# The histogram of the figure has bins of equal width within 3 deviations around the mean.
_BINS, _REACH = 24, 3.0


@dataclass(frozen=True)
class ImagesRegression(PictureTask):
    """Pictures with a number each, and any classification model of torchvision.

    The loss is the squared error in units of the labels' deviation. `mae` and `rmse` have the unit
    of the labels.
    """

    best_by: ClassVar[str] = "min:mae"
    train_metrics: ClassVar[tuple[str, ...]] = ("mae",)

    # The mean by which the labels are scaled.
    mean: float = 0.0
    # The standard deviation of the labels. 0 means the mean and the deviation of the training part.
    deviation: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, FROM_0, "deviation")

    @property
    def outputs(self) -> int:
        return 1

    def with_data(self, data_dir: Path) -> Self:
        task = super().with_data(data_dir)
        # A prediction does without the labels. For others, the dataset raises the error.
        with contextlib.suppress(WrongUse):
            if not self.deviation:
                (values_N,) = task.targets(task.parts(data_dir / self.folder)[TRAIN], True)
                deviation = float(values_N.double().std(correction=0))
                return replace(
                    task, mean=float(values_N.double().mean()), deviation=deviation or 1.0
                )
        return task

    def targets(self, pictures: Sequence[Picture], is_training: bool) -> tuple[Tensor, ...]:
        """Return the numbers (N,)."""
        return (torch.tensor([*map(_number, pictures)], dtype=torch.float32),)

    def described(self, train: Sequence[Picture], validation: Sequence[Picture]) -> dict[str, str]:
        (values_N,) = self.targets(train, True)
        scaled = f"mean {self.mean:.4g}, deviation {self.deviation:.4g}"
        return {"labels": f"{values_N.min():.4g} to {values_N.max():.4g}, {scaled}"}

    def wrapped(self, model: nn.Module) -> nn.Module:
        return Scaled(model, self.mean, self.deviation or 1.0)

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images_BCHW, targets_B = batch
        errors_B = (model(images_BCHW) - targets_B) / self.deviation
        return {"squared_error": errors_B**2, "mae": errors_B.abs() * self.deviation}

    def statistics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images_BCHW, targets_B = batch
        predicted_B, true_B = (
            (values_B - self.mean) / self.deviation for values_B in (model(images_BCHW), targets_B)
        )
        errors_B = predicted_B - true_B
        return {
            "loss": (errors_B**2).sum(),
            "absolute": errors_B.abs().sum(),
            "labels": true_B.sum(),
            "squares": (true_B**2).sum(),
            "histogram": metrics.confusion_matrix(_bin(true_B), _bin(predicted_B), _BINS),
        }

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics. `r2` is the share of the labels' variance that is explained."""
        count = totals["examples"]
        variance = totals["squares"] / count - (totals["labels"] / count) ** 2
        loss = float(totals["loss"] / count)
        return {
            "loss": loss,
            "mae": float(totals["absolute"] / count) * self.deviation,
            "rmse": math.sqrt(loss) * self.deviation,
            "r2": float(1 - loss / variance),
        }

    def predictions(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images_BCHW, targets_B = batch
        return {"truth": targets_B, "prediction": model(images_BCHW)}

    def figures(
        self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]
    ) -> dict[str, pictures.Picture]:
        ends = (self.mean - _REACH * self.deviation, self.mean + _REACH * self.deviation)
        return {"prediction_and_truth": partial(_heat_map, totals["histogram"].numpy(), ends)}


def _number(picture: Picture) -> float:
    if not picture.labels:  # a picture to predict
        return 0.0
    try:
        number = float(picture.labels[0])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise WrongUse(
            f"{picture.row} has the label {picture.labels[0]!r}, which is no finite number: write "
            "a number such as 3.7, or name another column with --set label_column=NAME"
        )
    return number


def _bin(values_B: Tensor) -> Tensor:
    """Return the bin of each value: (B,) int64."""
    bins_B = ((values_B + _REACH) / (2 * _REACH) * _BINS).clamp(0, _BINS - 1)
    return bins_B.nan_to_num().long()


def _heat_map(counts: Any, ends: tuple[float, float]) -> Tensor:
    """Draw how often each pair of a true and a predicted number occurs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(counts.T, "Blues", origin="lower", extent=(*ends, *ends), vmin=0)
    axes.plot(ends, ends, color="grey", linewidth=0.5)
    axes.set(xlabel="label", ylabel="prediction")
    return pictures.from_figure(figure)
