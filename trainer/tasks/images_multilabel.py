"""Find several labels of each picture with a model of torchvision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainbox import pictures
from trainer.tasks.imaging.parts import TRAIN, Picture
from trainer.tasks.imaging.picture_classes import PictureClasses

# Shape suffixes: B pictures of a batch, N pictures of a data set, K labels.

_MOST_BARS = 40


@dataclass(frozen=True)
class ImagesMultilabel(PictureClasses):
    """Pictures with any number of labels each, and any classification model of torchvision.

    The loss of a picture is the mean of its labels' binary cross-entropies. `accuracy` and
    `macro_f1` are means over the labels, and `exact` is the share of pictures whose labels are all
    right.
    """

    best_by: ClassVar[str] = "max:macro_f1"
    train_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    flags: ClassVar[bool] = True

    # The characters that separate the labels in a cell of the CSV file.
    separators: str = ",;|"

    def labels_of(self, cell: str) -> tuple[str, ...]:
        for separator in self.separators[1:]:
            cell = cell.replace(separator, self.separators[0])
        labels = cell.split(self.separators[0]) if self.separators else [cell]
        return tuple(dict.fromkeys(label.strip() for label in labels if label.strip()))

    def targets(self, pictures: Sequence[Picture], is_training: bool) -> tuple[Tensor, ...]:
        """Return (N, K): 1 for each label of a picture, else 0."""
        targets_NK = torch.zeros(len(pictures), len(self.class_names))
        index = {name: k for k, name in enumerate(self.class_names)}
        for n, picture in enumerate(pictures):
            targets_NK[n, [index[name] for name in picture.labels if name in index]] = 1
        return (targets_NK,)

    def check_part(
        self, folder: Path, part: Sequence[Picture], purpose: str, skipped: set[Path]
    ) -> None:
        super(PictureClasses, self).check_part(folder, part, purpose, skipped)
        if purpose == TRAIN:  # a rare label may be missing in the others
            super().check_part(folder, part, purpose, skipped)

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images_BCHW, targets_BK = batch
        logits_BK = model(images_BCHW).float()
        loss_BK = F.binary_cross_entropy_with_logits(logits_BK, targets_BK, reduction="none")
        right_BK = (logits_BK > 0) == (targets_BK > 0)
        return {"binary_cross_entropy": loss_BK.mean(1), "accuracy": right_BK.float().mean(1)}

    def statistics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images_BCHW, targets_BK = batch
        logits_BK = model(images_BCHW).float()
        loss_BK = F.binary_cross_entropy_with_logits(logits_BK, targets_BK, reduction="none")
        found_BK, true_BK = logits_BK > 0, targets_BK > 0
        return {
            "loss": loss_BK.mean(1).sum(),
            "hits": (found_BK & true_BK).sum(0),
            "found_and_true": found_BK.sum(0) + true_BK.sum(0),
            "right": (found_BK == true_BK).sum(0),
            "exact": (found_BK == true_BK).all(1).sum(),
        }

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics, and the F1 score of each label, which is NaN if it never occurs."""
        examples, f1_K = totals["examples"], _f1(totals)
        return {
            "loss": float(totals["loss"] / examples),
            "accuracy": float(totals["right"].mean() / examples),
            "macro_f1": float(f1_K.nanmean()),
            "exact": float(totals["exact"] / examples),
            **{f"f1_{name}": float(f1) for name, f1 in zip(self.class_names, f1_K, strict=True)},
        }

    def predictions(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return `truth` and `prediction`, 1 or 0 for each label, and the `probability`."""
        images_BCHW, targets_BK = batch
        logits_BK = model(images_BCHW).float()
        return {
            "truth": targets_BK.long(),
            "prediction": (logits_BK > 0).long(),
            "probability": logits_BK.sigmoid(),
        }

    def figures(
        self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]
    ) -> dict[str, pictures.Picture]:
        return {"f1": partial(_bars, _f1(totals).tolist(), self.class_names)}


def _f1(totals: Mapping[str, Tensor]) -> Tensor:
    """Return the F1 score of each label."""
    return 2 * totals["hits"] / totals["found_and_true"]


def _bars(f1_K: Sequence[float], names: Sequence[str]) -> Tensor:
    """Draw the F1 score of each label as a bar, or of the labels with the lowest ones."""
    from matplotlib.figure import Figure

    lowest = sorted(range(len(names)), key=lambda k: (f1_K[k] != f1_K[k], f1_K[k]))[:_MOST_BARS]
    shown = sorted(lowest)
    f1_K, names = [f1_K[k] for k in shown], [names[k] for k in shown]
    figure = Figure(figsize=(6, 1 + 0.25 * len(names)), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(len(names)), f1_K, tick_label=names)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="F1 score of the validation")
    return pictures.from_figure(figure)
