"""Define `PictureTask`: the data, the model and the inputs of the tasks `images` and its kinds."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from PIL import UnidentifiedImageError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainbox import Task, WrongUse
from trainer.tasks.imaging import picture as picture_file
from trainer.tasks.imaging.augment import load_augmented_picture
from trainer.tasks.imaging.class_folders import ENDINGS, equal_pictures, left_out
from trainer.tasks.imaging.csv_labels import Columns, pictures_of_csv, refuse_missing_files
from trainer.tasks.imaging.damage import (
    damaged_pictures,
    damaged_use,
    found_damage,
    refuse_damaged,
)
from trainer.tasks.imaging.models import (
    Averaged,
    build_model,
    check_model,
    describe_weights,
    fetch_weights,
    normalization,
)
from trainer.tasks.imaging.parts import TEST, TRAIN, VALIDATION, Picture, split
from trainer.tasks.reading.fields import FROM_0_BELOW_1, FROM_1, SHARE, check_fields

# Shape suffixes: B pictures of a batch, N pictures of a data set, C channels, H height, W width.


@dataclass(frozen=True)
class PictureTask(Task):
    """Pictures with labels, and a model of torchvision. Subclasses give the labels a meaning."""

    epochs: ClassVar[int] = 30
    batch_size: ClassVar[int] = 64
    learning_rate: ClassVar[float] = 1e-3
    example_endings: ClassVar[tuple[str, ...]] = ENDINGS
    # Whether a CSV file may have a column with 1 or 0 for each label, and rows without labels.
    flags: ClassVar[bool] = False

    # The folder of the pictures in --data-dir, or an absolute path.
    folder: str = "images"
    # The CSV file of the labels in `folder`.
    labels: str = "labels.csv"
    # The column of the names in the CSV file. An empty string means file or file_name.
    file_column: str = ""
    # The column of the labels. An empty string means label or labels.
    label_column: str = ""
    # The column that has train, val or test. An empty string means part or split, if it exists.
    part_column: str = ""
    # Any classification model of torchvision.
    model: str = "resnet18"
    # Weights of torchvision, such as DEFAULT, or a .safetensors, .pt or .pth file.
    weights: str = ""
    # The height and the width in pixels that the model sees.
    size: int = 224
    # The shorter side of a picture for validation. 0 means 8/7 of `size`.
    resize: int = 0
    # The share of the pictures for validation, if nothing marks them.
    validation_share: float = 0.2
    # The share of the pictures for `evaluate --data test`, if nothing marks the parts.
    test_share: float = 0.0
    # The seed that chooses the pictures for validation and test.
    split_seed: int = 0
    # Whether a training sees random regions, flips and colours.
    augment: bool = True
    # The decay of the moving average of the weights. 0 switches it off.
    ema: float = 0.0
    # Whether damaged and missing pictures are left out.
    skip_damaged: bool = False

    def __post_init__(self) -> None:
        check_model(self.model, self.weights)
        check_fields(self, FROM_1, "size")
        check_fields(self, SHARE, "validation_share")
        check_fields(self, FROM_0_BELOW_1, "ema", "test_share")
        if self.validation_share + self.test_share >= 1:
            raise WrongUse(
                f"--set test_share={self.test_share}: use a number below "
                f"{1 - self.validation_share:g}, which leaves pictures for the training"
            )
        if self.resize and self.resize < self.size:
            raise WrongUse(
                f"--set resize={self.resize}: use a number from size={self.size}, or 0 for "
                f"{round(self.size * 8 / 7)}"
            )

    @property
    def outputs(self) -> int:
        """The number of outputs of the model."""
        raise NotImplementedError

    def targets(self, pictures: Sequence[Picture], is_training: bool) -> tuple[Tensor, ...]:
        """Return tensors (N, ...), which follow the pixels in a batch."""
        raise NotImplementedError

    def described(self, train: Sequence[Picture], validation: Sequence[Picture]) -> dict[str, str]:
        """Return a line about the labels of each part, `{name: line}`."""
        raise NotImplementedError

    def with_data(self, data_dir: Path) -> Self:
        fetch_weights(self.model, self.weights)  # the first process downloads before the others
        return self

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self.pictures(data_dir)[0]

    def validation_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self.pictures(data_dir)[1]

    def test_dataset(self, data_dir: Path) -> Dataset[Any]:
        folder = data_dir / self.folder
        pictures = self.parts(folder, test=True)[TEST]
        if not pictures:
            raise WrongUse(
                f"{folder} has no test data: mark rows with test in a column part, choose a share "
                "with --set test_share=0.1, or use --data validation"
            )
        pictures, skipped = self._whole(folder, pictures)
        self.check_part(folder, pictures, "the test", skipped)
        return self._dataset(pictures)

    def prediction_dataset(self, files: Sequence[Path]) -> Dataset[Any]:
        """Return the pictures without labels. All are decoded first, to find damaged ones."""
        damaged = found_damage(files)
        if damaged and not self.skip_damaged:
            raise damaged_use(damaged, "replace it or leave it out")
        pictures = [Picture(path, str(path)) for path in files if path not in damaged]
        return self._dataset(pictures, skipped=list(damaged))

    def pictures(self, data_dir: Path) -> "tuple[Pictures, Pictures]":
        """Return the training part and the validation part.

        Raises:
            WrongUse: a part lacks pictures, or a picture cannot be read, or is damaged and not
                skipped.
        """
        folder = data_dir / self.folder
        parts = self.parts(folder)
        listed = parts[TRAIN] + parts[VALIDATION]
        _, skipped = self._whole(folder, listed)
        train, validation = (
            [picture for picture in parts[part] if picture.path not in skipped]
            for part in (TRAIN, VALIDATION)
        )
        self.check_part(folder, train, "training", skipped)
        self.check_part(folder, validation, "validation", skipped)
        hidden = left_out(folder, [*train, *validation])
        return (
            self._dataset(train, is_training=True, skipped=sorted(skipped), hidden=hidden),
            self._dataset(validation),
        )

    def input_source(self) -> str:
        source = Path(picture_file.__file__).read_text(encoding="utf-8")
        return (
            f"{source}\n\ndef load(path: Path) -> Tensor:\n"
            '    """Return a picture as an input of the model, without the batch."""\n'
            f"    return load_picture(path, {self.size}, {self._resize})\n"
        )

    def notes(self, train: Dataset[Any], validation: Dataset[Any]) -> dict[str, str]:
        assert isinstance(train, Pictures) and isinstance(validation, Pictures)
        notes = self.described(train.pictures, validation.pictures)
        if self.weights:
            notes["weights"] = describe_weights(self.model, self.outputs, self.size, self.weights)
        if equal := equal_pictures(train.pictures, validation.pictures):
            notes["equal"] = equal
        if train.hidden:
            notes["left out"] = train.hidden
        if self.skip_damaged:
            first = f": {', '.join(map(str, train.skipped[:3]))}" if train.skipped else ""
            notes["damaged"] = f"{len(train.skipped)} pictures are skipped{first}"
        return notes

    def build_model(self) -> nn.Module:
        model = self.wrapped(build_model(self.model, self.outputs, self.size, self.weights))
        return Averaged(model, self.ema) if self.ema else model

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return a model of torchvision with what the task adds to its outputs."""
        return model

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

    def images(self, pictures_BHWC: Tensor, training: bool) -> Tensor:
        """Return the pictures (B, H, W, C) uint8 normalized as (B, C, H, W), some flipped."""
        if training and self.augment:
            count, device = len(pictures_BHWC), pictures_BHWC.device
            flipped_B111 = torch.rand(count, 1, 1, 1, device=device) < 0.5
            pictures_BHWC = torch.where(flipped_B111, pictures_BHWC.flip(2), pictures_BHWC)
        images_BCHW = pictures_BHWC.permute(0, 3, 1, 2).to(
            torch.float32, memory_format=torch.contiguous_format
        )
        # An export traces twice, and must not keep the tensors of its first trace.
        colours = _colours.__wrapped__ if torch.compiler.is_exporting() else _colours
        mean_C11, std_C11 = colours(self.model, self.weights, pictures_BHWC.device)
        return images_BCHW.sub_(mean_C11).div_(std_C11)

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor]:
        pictures_BHWC, targets = batch
        return self.images(pictures_BHWC, training), targets

    def check_part(
        self, folder: Path, part: Sequence[Picture], purpose: str, skipped: set[Path]
    ) -> None:
        """Raise WrongUse if the pictures cannot be used for `purpose`."""
        if not part:
            besides = f" (damaged pictures are skipped, such as {min(skipped)})" if skipped else ""
            raise WrongUse(f"{folder} has no picture for {purpose}{besides}: add pictures")

    def listed(self, folder: Path, test: bool) -> list[Picture]:
        """Return the pictures with their labels and parts, or at least of the test."""
        columns = Columns(self.file_column, self.label_column, self.part_column, self.flags)
        return pictures_of_csv(folder, self.labels, columns, self.labels_of)

    def labels_of(self, cell: str) -> tuple[str, ...]:
        """Return the labels of a cell of the CSV file, without any for an empty cell."""
        return (cell,) if cell else ()

    @property
    def _resize(self) -> int:
        return self.resize or round(self.size * 8 / 7)

    def parts(self, folder: Path, test: bool = False) -> dict[str, list[Picture]]:
        listed = self.listed(folder, test)
        return split(listed, self.validation_share, self.test_share, self.split_seed)

    def _whole(self, folder: Path, pictures: Sequence[Picture]) -> tuple[list[Picture], set[Path]]:
        """Return the pictures that are not damaged, and the paths of damaged ones.

        Raises:
            WrongUse: a picture is damaged, and --set skip_damaged is not given.
        """
        if not self.skip_damaged:
            refuse_missing_files(pictures)
            refuse_damaged(pictures)
            return list(pictures), set()
        skipped = damaged_pictures(folder, pictures)
        return [picture for picture in pictures if picture.path not in skipped], skipped

    def _dataset(
        self,
        pictures: Sequence[Picture],
        *,
        is_training: bool = False,
        skipped: Sequence[Path] = (),
        hidden: str = "",
    ) -> "Pictures":
        return Pictures(
            pictures,
            self.targets(pictures, is_training),
            self.size,
            self._resize,
            augment=is_training and self.augment,
            skipped=skipped,
            hidden=hidden,
        )


class Pictures(Dataset[Any]):
    """A dataset of (picture (size, size, 3) uint8, *targets).

    `skipped` are the paths of damaged pictures, which were left out. `hidden` is a line about
    hidden pictures.
    """

    def __init__(
        self,
        pictures: Sequence[Picture],
        targets: tuple[Tensor, ...],
        size: int,
        resize: int,
        *,
        augment: bool,
        skipped: Sequence[Path],
        hidden: str,
    ) -> None:
        self.pictures, self.targets = pictures, targets
        self.skipped, self.hidden = skipped, hidden
        self.size, self.resize, self.augment = size, resize, augment

    @property
    def ids(self) -> list[str]:
        """The paths of the pictures, for the predictions of an evaluation."""
        return [str(picture.path) for picture in self.pictures]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        picture = self.pictures[index]
        try:
            if self.augment:
                pixels_HWC = load_augmented_picture(picture.path, self.size)
            else:
                pixels_HWC = picture_file.load_picture(picture.path, self.size, self.resize)
        except UnidentifiedImageError as error:
            raise damaged_use({picture.path: str(error)}) from error
        return pixels_HWC, *(values_N[index] for values_N in self.targets)


@functools.cache
def _colours(model: str, weights: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation of the colours, from 0 to 255, each (3, 1, 1)."""
    mean_C11, std_C11 = (
        torch.tensor(values, device=device)[:, None, None] * 255
        for values in normalization(model, weights)
    )
    return mean_C11, std_C11
