"""Augment pictures: a random region of each, and the mixture of two in a batch."""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributions import Beta
from torchvision.transforms import v2

from trainer.tasks.imaging.picture import Box, pixels, region

# Shape suffixes: B pictures, C channels, H height, W width, K classes.

_RANDOM_CROP = v2.RandomResizedCrop(1)
_TRIVIAL_AUGMENT = v2.TrivialAugmentWide()


def load_augmented_picture(path: Path, size: int) -> Tensor:
    """Return a random region of a picture, augmented, as (`size`, `size`, 3) uint8.

    torchvision's RandomResizedCrop chooses the region, and TrivialAugmentWide follows. Both draw
    from torch's generator.

    Raises:
        UnidentifiedImageError: the file cannot be decoded.
    """
    return pixels(_TRIVIAL_AUGMENT(region(path, size, _random_box)))


def _random_box(width: int, height: int) -> Box:
    # A tensor of this shape without memory: torchvision only reads the shape.
    drawn = _RANDOM_CROP.make_params([torch.empty(1).expand(height, width)])
    left, top = drawn["left"], drawn["top"]
    return left, top, left + drawn["width"], top + drawn["height"]


def mixed(
    images_BCHW: Tensor, targets_BK: Tensor, mixup: float, cutmix: float
) -> tuple[Tensor, Tensor]:
    """Return the batch with each picture mixed with the one before it.

    `mixup` and `cutmix` are the alpha of Mixup (Zhang et al., 2018) and of CutMix (Yun et al.,
    2019), and 0 switches one off. With both, each picture draws one of them. The random numbers are
    drawn for each picture, from the generator of the device.
    """
    if mixup and cutmix:
        drawn_B = torch.rand(len(images_BCHW), device=images_BCHW.device) < 0.5
        own_B1HW = torch.where(
            drawn_B.view(-1, 1, 1, 1), _blended(images_BCHW, mixup), _cut(images_BCHW, cutmix)
        )
    else:
        own_B1HW = _blended(images_BCHW, mixup) if mixup else _cut(images_BCHW, cutmix)
    share_B1 = own_B1HW.mean((2, 3))
    return (
        own_B1HW * images_BCHW + (1 - own_B1HW) * images_BCHW.roll(1, 0),
        share_B1 * targets_BK + (1 - share_B1) * targets_BK.roll(1, 0),
    )


def _blended(images_BCHW: Tensor, alpha: float) -> Tensor:
    """Return the share (B, 1, H, W) of each pixel's own picture, the same for all pixels."""
    shares_B = _shares(images_BCHW, alpha)
    return shares_B.view(-1, 1, 1, 1).expand(-1, 1, *images_BCHW.shape[2:])


def _cut(images_BCHW: Tensor, alpha: float) -> Tensor:
    """Return (B, 1, H, W): 0 in a rectangle that comes from the other picture, else 1."""
    sides_B = (1 - _shares(images_BCHW, alpha)).sqrt()
    inside = []
    for length in images_BCHW.shape[2:]:
        middle_B1 = length * torch.rand(len(sides_B), 1, device=sides_B.device)
        pixels_L = torch.arange(length, device=sides_B.device) + 0.5
        inside.append((pixels_L - middle_B1).abs() < sides_B.view(-1, 1) * length / 2)
    rows_BH, columns_BW = inside
    return 1 - (rows_BH[:, None, :, None] & columns_BW[:, None, None, :]).float()


def _shares(images_BCHW: Tensor, alpha: float) -> Tensor:
    # `torch.tensor` and the checks of arguments would wait for the GPU.
    concentration = torch.full((), float(alpha), device=images_BCHW.device)
    beta = Beta(concentration, concentration, validate_args=False)
    shares_B: Tensor = beta.sample(torch.Size([len(images_BCHW)]))
    return shares_B
