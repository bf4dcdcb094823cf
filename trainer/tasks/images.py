"""Classify pictures with a model of torchvision. Their labels are folders or a CSV file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainbox import WrongUse
from trainer.tasks.imaging.augment import mixed
from trainer.tasks.imaging.class_folders import find_layout, pictures_of_folders
from trainer.tasks.imaging.csv_labels import refuse_unused_csv
from trainer.tasks.imaging.parts import Picture
from trainer.tasks.imaging.picture_classes import PictureClasses
from trainer.tasks.reading.fields import FROM_0_BELOW_1, check_fields
from trainer.tasks.reading.files import check_classes, class_weights, find_classes

# Shape suffixes: B pictures of a batch, N pictures of a data set, K classes.

_TOP = 5


@dataclass(frozen=True)
class Images(PictureClasses):
    """Pictures of one class each, with any classification model of torchvision."""

    best_by: ClassVar[str] = "max:macro_f1"
    train_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    # The CSV file of the labels in `folder`. An empty string means a folder per class.
    labels: str = ""
    # The share of each target that is spread over all classes.
    label_smoothing: float = 0.0
    # The alpha of Mixup. 0 switches it off.
    mixup: float = 0.0
    # The alpha of CutMix. 0 switches it off.
    cutmix: float = 0.0
    # Whether rare classes have a larger weight in the loss.
    class_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes:
            check_classes(self.class_names)
        check_fields(self, FROM_0_BELOW_1, "label_smoothing")
        for name in ("mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise WrongUse(
                    f"--set {name}={getattr(self, name)}: use a number above 0, such as 0.2, or 0 "
                    f"to train without {name}"
                )

    def find_classes(self, folder: Path) -> Sequence[str]:
        if self.labels:
            return super().find_classes(folder)
        train, _ = find_layout(folder)
        refuse_unused_csv(folder)
        return find_classes(train, "pictures", "NAME.jpg")

    def listed(self, folder: Path, test: bool) -> list[Picture]:
        if self.labels:
            listed = super().listed(folder, test)
            return [picture for picture in listed if picture.labels[0] in self.class_names]
        return pictures_of_folders(folder, self.class_names, test, self.test_share)

    def targets(self, pictures: Sequence[Picture], is_training: bool) -> tuple[Tensor, ...]:
        """Return the labels and the weights of their classes, (N,) each."""
        index = {name: k for k, name in enumerate(self.class_names)}
        # A picture to predict has no label.
        labels = [index[picture.labels[0]] if picture.labels else 0 for picture in pictures]
        weights_K = torch.ones(len(self.class_names))
        if is_training and self.class_weights:
            weights_K = class_weights(labels, len(weights_K))
        labels_N = torch.tensor(labels, dtype=torch.int64)
        return labels_N, weights_K[labels_N]

    def described(self, train: Sequence[Picture], validation: Sequence[Picture]) -> dict[str, str]:
        notes = super().described(train, validation)
        if self.class_weights:
            weights_N = self.targets(train, is_training=True)[1]
            least, most = float(weights_N.min()), float(weights_N.max())
            notes["classes"] += f" (weights from {least:.3g} to {most:.3g})"
        return notes

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor]:
        """Return the images and their labels (B,), or the targets (B, K) of a training.

        A training without mixing, smoothing and weights has labels. The losses of labels and of
        targets have the same bits.
        """
        pictures_BHWC, labels_B, weights_B = batch
        images_BCHW = self.images(pictures_BHWC, training)
        mixes = self.mixup or self.cutmix
        if not (training and (mixes or self.label_smoothing or self.class_weights)):
            return images_BCHW, labels_B
        # The targets have the weight of the class, so that the loss is linear in the targets.
        classes = len(self.class_names)
        targets_BK = F.one_hot(labels_B, classes) * (1 - self.label_smoothing)
        targets_BK = (targets_BK + self.label_smoothing / classes) * weights_B[:, None]
        if mixes:
            return mixed(images_BCHW, targets_BK, self.mixup, self.cutmix)
        return images_BCHW, targets_BK

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images_BCHW, targets = batch
        logits_BK = model(images_BCHW)
        labels_B = targets if targets.dim() == 1 else targets.argmax(1)
        return {
            "cross_entropy": F.cross_entropy(logits_BK, targets, reduction="none"),
            "accuracy": logits_BK.argmax(1) == labels_B,
        }

    def sums(self, logits_BK: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
        sums = super().sums(logits_BK, labels_B)
        if logits_BK.shape[1] > _TOP:
            sums["top5"] = (logits_BK.topk(_TOP).indices == labels_B[:, None]).sum()
        return sums

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        metrics = super().metrics(totals)
        if "top5" in totals:
            metrics["top5"] = float(totals["top5"] / totals["examples"])
        return metrics
