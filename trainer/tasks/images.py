"""Classify pictures from a folder per class, with a model of torchvision."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainbox import Classification, WrongUse
from trainer.tasks.imaging.damage import damaged_pictures, damaged_use, refuse_damaged
from trainer.tasks.imaging.decode import DamagedPicture, load_augmented_picture, load_picture
from trainer.tasks.imaging.folder import (
    Picture,
    find_classes,
    find_layout,
    find_pictures,
    is_held_out,
    refuse_other_classes,
)
from trainer.tasks.imaging.models import (
    build_model,
    check_model,
    describe_weights,
    fetch_weights,
    normalization,
)

# Shape suffixes: B pictures of a batch, C channels, H height, W width, K classes.

_TOP = 5
_SHOWN_CLASSES = 10


@dataclass(frozen=True)
class Images(Classification):
    """Pictures from a folder per class, with any classification model of torchvision."""

    epochs: ClassVar[int] = 30
    batch_size: ClassVar[int] = 64
    learning_rate: ClassVar[float] = 1e-3
    best_by: ClassVar[str] = "max:macro_f1"

    folder: str = "images"
    model: str = "resnet18"
    # Weights of torchvision, such as DEFAULT, or a .safetensors, .pt or .pth file.
    weights: str = ""
    size: int = 224
    # The shorter side of a picture for validation. 0 means 8/7 of `size`.
    resize: int = 0
    # The names of the class folders, as in daisy/rose. An empty string means all folders, sorted.
    classes: str = ""
    validation_share: float = 0.2
    augment: bool = True
    skip_damaged: bool = False

    def __post_init__(self) -> None:
        check_model(self.model, self.weights)
        if self.size < 1:
            raise WrongUse(f"--set size={self.size}: use a number of pixels from 1")
        if self.resize and self.resize < self.size:
            raise WrongUse(
                f"--set resize={self.resize}: use a number from size={self.size}, or 0 for "
                f"{round(self.size * 8 / 7)}"
            )
        if not 0 < self.validation_share < 1:
            raise WrongUse(
                f"--set validation_share={self.validation_share}: use a number between 0 and 1"
            )

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The classes in the order of the model's outputs."""
        return tuple(self.classes.split("/")) if self.classes else ()

    def with_data(self, data_dir: Path) -> Self:
        fetch_weights(self.model, self.weights)  # the first process downloads before the others
        train = find_layout(data_dir / self.folder).train
        return replace(self, classes="/".join(self.class_names or find_classes(train)))

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self._pictures(data_dir)[0]

    def validation_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self._pictures(data_dir)[1]

    def notes(self, train: Dataset[Any], validation: Dataset[Any]) -> dict[str, str]:
        assert isinstance(train, _Pictures) and isinstance(validation, _Pictures)
        notes = {
            "classes": _counts(self.class_names, train.pictures),
            "validation": _counts(self.class_names, validation.pictures),
        }
        if self.weights:
            notes["weights"] = describe_weights(
                self.model, len(self.class_names), self.size, self.weights
            )
        if self.skip_damaged:
            skipped = [*train.skipped, *validation.skipped]
            first = f": {', '.join(map(str, skipped[:3]))}" if skipped else ""
            notes["damaged"] = f"{len(skipped)} pictures are skipped{first}"
        return notes

    def build_model(self) -> nn.Module:
        return build_model(self.model, len(self.class_names), self.size, self.weights)

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor]:
        pictures_BHWC, labels_B = batch
        pictures_BCHW = pictures_BHWC.permute(0, 3, 1, 2)
        if training and self.augment:
            flipped_B = torch.rand(len(pictures_BCHW), device=pictures_BCHW.device) < 0.5
            pictures_BCHW = torch.where(
                flipped_B.view(-1, 1, 1, 1), pictures_BCHW.flip(3), pictures_BCHW
            )
        mean_C11, std_C11 = (
            torch.tensor(values, device=pictures_BCHW.device).view(3, 1, 1) * 255
            for values in normalization(self.model, self.weights)
        )
        images_BCHW = (pictures_BCHW.float() - mean_C11) / std_C11
        return images_BCHW.contiguous(), labels_B

    def _pictures(self, data_dir: Path) -> "tuple[_Pictures, _Pictures]":
        """Return the training part and the validation part.

        Raises:
            WrongUse: a class has no picture, or a picture is damaged and not skipped.
        """
        # Find the pictures, and choose those for validation.
        folder = data_dir / self.folder
        layout = find_layout(folder)
        found = find_pictures(layout.train, self.class_names)
        if layout.validation is None:
            held_out = [
                is_held_out(picture.path.relative_to(folder).as_posix(), self.validation_share)
                for picture in found
            ]
            train = [picture for picture, held in zip(found, held_out, strict=True) if not held]
            validation = [picture for picture, held in zip(found, held_out, strict=True) if held]
        else:
            refuse_other_classes(layout.validation, self.class_names, layout.train)
            train, validation = found, find_pictures(layout.validation, self.class_names)
        # Check that the files are pictures.
        skipped: set[Path] = set()
        if self.skip_damaged:
            skipped = damaged_pictures(folder, [*train, *validation])
        else:
            refuse_damaged([*train, *validation])
        resize = self.resize or round(self.size * 8 / 7)
        parts = (
            _Pictures(train, skipped, self.size, resize, self.augment),
            _Pictures(validation, skipped, self.size, resize, augment=False),
        )
        for part, purpose in zip(parts, ("training", "validation"), strict=True):
            present = {picture.label for picture in part.pictures}
            if missing := [n for k, n in enumerate(self.class_names) if k not in present]:
                raise WrongUse(
                    f"{folder}: class {missing[0]} has no picture for {purpose}: add pictures, or "
                    "make the folders train and val"
                )
        return parts


class _Pictures(Dataset[Any]):
    """A dataset of (picture (size, size, 3) uint8, label), without the pictures `skipped`."""

    def __init__(
        self,
        pictures: Sequence[Picture],
        skipped: set[Path],
        size: int,
        resize: int,
        augment: bool,
    ) -> None:
        self.pictures = [picture for picture in pictures if picture.path not in skipped]
        self.skipped = [picture.path for picture in pictures if picture.path in skipped]
        self.size, self.resize, self.augment = size, resize, augment

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self.pictures[index]
        try:
            if self.augment:
                return load_augmented_picture(picture.path, self.size), picture.label
            return load_picture(picture.path, self.size, self.resize), picture.label
        except DamagedPicture as error:
            raise damaged_use(picture.path, str(error)) from error


def _counts(names: Sequence[str], pictures: Sequence[Picture]) -> str:
    """Return `daisy 120, rose 98` for the pictures of each class, or a summary of many classes."""
    counts = Counter(picture.label for picture in pictures)
    shown = [f"{name} {counts[k]:,}" for k, name in enumerate(names)][:_SHOWN_CLASSES]
    if len(names) > _SHOWN_CLASSES:
        most, least = max(counts.values()), min(counts.values())
        shown.append(f"... ({len(names)} classes with {least:,} to {most:,} pictures)")
    return ", ".join(shown)
