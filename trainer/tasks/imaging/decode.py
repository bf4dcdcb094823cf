"""Decode pictures for a training: augmented, or only to find damage."""

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms import v2

from trainer.tasks.imaging.picture import Box, pixels, region

_RANDOM_CROP = v2.RandomResizedCrop(1)
_TRIVIAL_AUGMENT = v2.TrivialAugmentWide()


def ignore_warnings() -> None:
    """Do not show Pillow's warnings of files that it can decode.

    Examples are damaged EXIF data and pictures of more than 89 million pixels. The warnings do not
    name the file.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


def load_augmented_picture(path: Path, size: int) -> Tensor:
    """Return a random region of a picture, augmented, as (`size`, `size`, 3) uint8.

    The region is that of torchvision's RandomResizedCrop, and TrivialAugmentWide follows. Both draw
    from torch's generator.

    Raises:
        UnidentifiedImageError: the file cannot be decoded.
    """
    return pixels(_TRIVIAL_AUGMENT(region(path, size, _random_box)))


def decode(path: Path) -> None:
    """Decode the whole picture, to find damage.

    Raises:
        UnidentifiedImageError: the file cannot be decoded.
    """
    region(path, 1, lambda width, height: (0, 0, width, height))


def _random_box(width: int, height: int) -> Box:
    # A tensor of this shape without memory: torchvision only reads the shape.
    drawn = _RANDOM_CROP.make_params([torch.empty(1).expand(height, width)])
    left, top = drawn["left"], drawn["top"]
    return left, top, left + drawn["width"], top + drawn["height"]
