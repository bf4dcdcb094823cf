"""Classify pictures from a folder per class, with a model of torchvision."""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from PIL import UnidentifiedImageError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainbox import Classification, WrongUse
from trainer.tasks.imaging import picture as picture_file
from trainer.tasks.imaging.augment import load_augmented_picture, mixed
from trainer.tasks.imaging.class_folders import (
    ENDINGS,
    Picture,
    equal_pictures,
    find_layout,
    find_pictures,
    left_out,
    refuse_missing_classes,
    refuse_other_classes,
)
from trainer.tasks.imaging.damage import (
    damaged_pictures,
    damaged_use,
    found_damage,
    refuse_damaged,
)
from trainer.tasks.imaging.models import (
    WEIGHTS_FILES,
    Averaged,
    build_model,
    check_model,
    describe_weights,
    fetch_weights,
    normalization,
)
from trainer.tasks.reading.fields import FROM_0_BELOW_1, FROM_1, SHARE, check_fields
from trainer.tasks.reading.files import (
    check_classes,
    class_weights,
    find_classes,
    is_held_out,
    test_folder,
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
    train_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    example_endings: ClassVar[tuple[str, ...]] = ENDINGS

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
    label_smoothing: float = 0.0
    # The alpha of Mixup and CutMix. 0 switches them off.
    mixup: float = 0.0
    cutmix: float = 0.0
    class_weights: bool = False
    # The decay of the moving average of the weights. 0 switches it off.
    ema: float = 0.0
    skip_damaged: bool = False

    def __post_init__(self) -> None:
        check_model(self.model, self.weights)
        if self.classes:
            check_classes(self.class_names)
        check_fields(self, FROM_1, "size")
        check_fields(self, SHARE, "validation_share")
        check_fields(self, FROM_0_BELOW_1, "label_smoothing", "ema")
        if self.resize and self.resize < self.size:
            raise WrongUse(
                f"--set resize={self.resize}: use a number from size={self.size}, or 0 for "
                f"{round(self.size * 8 / 7)}"
            )
        for name in ("mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise WrongUse(
                    f"--set {name}={getattr(self, name)}: use a number above 0, such as 0.2, or 0 "
                    f"to train without {name}"
                )

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The classes in the order of the model's outputs."""
        return tuple(self.classes.split("/")) if self.classes else ()

    def with_classes(self, names: tuple[str, ...]) -> Self:
        # The weights of the run replace the weights of a file, which may be missing now.
        weights = "" if self.weights.endswith(WEIGHTS_FILES) else self.weights
        return replace(self, classes="/".join(names), weights=weights)

    def with_data(self, data_dir: Path) -> Self:
        fetch_weights(self.model, self.weights)  # the first process downloads before the others
        if self.classes:
            return self
        names = find_classes(find_layout(data_dir / self.folder)[0], "pictures", "NAME.jpg")
        return replace(self, classes="/".join(names))

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self._pictures(data_dir)[0]

    def validation_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self._pictures(data_dir)[1]

    def test_dataset(self, data_dir: Path) -> Dataset[Any]:
        folder, weights_K = data_dir / self.folder, self._pictures(data_dir)[0].weights_K
        part = test_folder(folder)
        refuse_other_classes(part, self.class_names, find_layout(folder)[0], "the test")
        pictures = find_pictures(part, self.class_names)
        skipped = self._damaged(folder, pictures)
        pictures = [picture for picture in pictures if picture.path not in skipped]
        refuse_missing_classes(folder, self.class_names, pictures, "the test", skipped)
        return _Pictures(pictures, weights_K, self.size, self._resize, augment=False)

    def prediction_dataset(self, files: Sequence[Path]) -> Dataset[Any]:
        """Return the pictures without labels. All are decoded first, to find damaged ones."""
        damaged = found_damage(files)
        if damaged and not self.skip_damaged:
            raise damaged_use(damaged, "replace it or leave it out")
        pictures = [Picture(path, 0) for path in files if path not in damaged]
        weights_K = torch.ones(len(self.class_names))
        return _Pictures(pictures, weights_K, self.size, self._resize, False, list(damaged))

    def input_source(self) -> str:
        source = Path(picture_file.__file__).read_text(encoding="utf-8")
        return (
            f"{source}\n\ndef load(path: Path) -> Tensor:\n"
            '    """Return a picture as an input of the model, without the batch."""\n'
            f"    return load_picture(path, {self.size}, {self._resize})\n"
        )

    def notes(self, train: Dataset[Any], validation: Dataset[Any]) -> dict[str, str]:
        assert isinstance(train, _Pictures) and isinstance(validation, _Pictures)
        classes = _counts(self.class_names, train.pictures)
        if self.class_weights:
            weights = train.weights_K.tolist()
            classes += f" (weights from {min(weights):.3g} to {max(weights):.3g})"
        notes = {
            "classes": classes,
            "validation": _counts(self.class_names, validation.pictures),
        }
        if self.weights:
            notes["weights"] = describe_weights(
                self.model, len(self.class_names), self.size, self.weights
            )
        if equal := equal_pictures(train.pictures, validation.pictures):
            notes["equal"] = equal
        if train.left_out:
            notes["left out"] = train.left_out
        if self.skip_damaged:
            first = f": {', '.join(map(str, train.skipped[:3]))}" if train.skipped else ""
            notes["damaged"] = f"{len(train.skipped)} pictures are skipped{first}"
        return notes

    def build_model(self) -> nn.Module:
        model = build_model(self.model, len(self.class_names), self.size, self.weights)
        return Averaged(model, self.ema) if self.ema else model

    def build_optimizer(
        self, model: nn.Module, name: str, learning_rate: float, weight_decay: float | None
    ) -> "Optimizer | tuple[Optimizer, ...]":
        if not isinstance(model, Averaged):
            return super().build_optimizer(model, name, learning_rate, weight_decay)
        if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
            raise WrongUse(
                f"--set ema={self.ema}: the average of weights does not work with --strategy fsdp: "
                "use --strategy ddp, or --set ema=0"
            )
        optimizer = super().build_optimizer(model.model, name, learning_rate, weight_decay)
        assert isinstance(optimizer, Optimizer)
        optimizer.register_step_post_hook(lambda *_: model.update())
        return optimizer

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor]:
        """Return the images and their labels (B,), or the targets (B, K) of a training.

        A training without mixing, smoothing and weights has labels. The losses of labels and of
        targets have the same bits.
        """
        pictures_BHWC, labels_B, weights_B = batch
        if training and self.augment:
            flipped_B111 = torch.rand(len(labels_B), 1, 1, 1, device=labels_B.device) < 0.5
            pictures_BHWC = torch.where(flipped_B111, pictures_BHWC.flip(2), pictures_BHWC)
        images_BCHW = pictures_BHWC.permute(0, 3, 1, 2).to(
            torch.float32, memory_format=torch.contiguous_format
        )
        mean_C11, std_C11 = _colours(self.model, self.weights, labels_B.device)
        images_BCHW.sub_(mean_C11).div_(std_C11)
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

    @property
    def _resize(self) -> int:
        return self.resize or round(self.size * 8 / 7)

    def _pictures(self, data_dir: Path) -> "tuple[_Pictures, _Pictures]":
        """Return the training part and the validation part.

        Raises:
            WrongUse: a class has no picture, or a picture cannot be read, or is damaged and not
                skipped.
        """
        # Find the pictures, and choose the pictures for validation.
        folder = data_dir / self.folder
        train_folder, validation_folder = find_layout(folder)
        found = find_pictures(train_folder, self.class_names)
        if validation_folder is None:
            held_out = [
                is_held_out(picture.path.relative_to(folder).as_posix(), self.validation_share)
                for picture in found
            ]
            train = [picture for picture, held in zip(found, held_out, strict=True) if not held]
            validation = [picture for picture, held in zip(found, held_out, strict=True) if held]
        else:
            refuse_other_classes(validation_folder, self.class_names, train_folder, "validation")
            train, validation = found, find_pictures(validation_folder, self.class_names)
        # Check that the files are pictures.
        skipped = self._damaged(folder, [*train, *validation])
        train, validation = (
            [picture for picture in part if picture.path not in skipped]
            for part in (train, validation)
        )
        for part, purpose in ((train, "training"), (validation, "validation")):
            refuse_missing_classes(folder, self.class_names, part, purpose, skipped)
        # Weigh the classes by their number of pictures for training.
        weights_K = torch.ones(len(self.class_names))
        if self.class_weights:
            weights_K = class_weights([picture.label for picture in train], len(weights_K))
        return (
            _Pictures(
                train,
                weights_K,
                self.size,
                self._resize,
                self.augment,
                sorted(skipped),
                left_out(folder, [*train, *validation]),
            ),
            _Pictures(validation, weights_K, self.size, self._resize, augment=False),
        )

    def _damaged(self, folder: Path, pictures: Sequence[Picture]) -> set[Path]:
        """Return the damaged files of `pictures`, or refuse them without --set skip_damaged."""
        if self.skip_damaged:
            return damaged_pictures(folder, pictures)
        refuse_damaged(pictures)
        return set()


class _Pictures(Dataset[Any]):
    """A dataset of (picture (size, size, 3) uint8, label, weight of its class).

    `skipped` are the paths of damaged pictures, which were left out. `left_out` is a line about
    hidden pictures.
    """

    def __init__(
        self,
        pictures: Sequence[Picture],
        weights_K: Tensor,
        size: int,
        resize: int,
        augment: bool,
        skipped: Sequence[Path] = (),
        left_out: str = "",
    ) -> None:
        self.pictures, self.weights_K, self.skipped = pictures, weights_K, skipped
        self.left_out = left_out
        self.size, self.resize, self.augment = size, resize, augment

    @property
    def ids(self) -> list[str]:
        """The paths of the pictures, for the predictions of an evaluation."""
        return [str(picture.path) for picture in self.pictures]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int, Tensor]:
        picture = self.pictures[index]
        try:
            if self.augment:
                pixels_HWC = load_augmented_picture(picture.path, self.size)
            else:
                pixels_HWC = picture_file.load_picture(picture.path, self.size, self.resize)
        except UnidentifiedImageError as error:
            raise damaged_use({picture.path: str(error)}) from error
        return pixels_HWC, picture.label, self.weights_K[picture.label]


@functools.cache
def _colours(model: str, weights: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation of the colours, from 0 to 255, each (3, 1, 1)."""
    mean_C11, std_C11 = (
        torch.tensor(values, device=device)[:, None, None] * 255
        for values in normalization(model, weights)
    )
    return mean_C11, std_C11


def _counts(names: Sequence[str], pictures: Sequence[Picture]) -> str:
    """Return `daisy 120, rose 98` for the pictures of each class, or a summary of many classes."""
    counts = Counter(picture.label for picture in pictures)
    shown = [f"{name} {counts[k]:,}" for k, name in enumerate(names)][:_SHOWN_CLASSES]
    if len(names) > _SHOWN_CLASSES:
        most, least = max(counts.values()), min(counts.values())
        shown.append(f"... ({len(names)} classes with {least:,} to {most:,} pictures)")
    return ", ".join(shown)
