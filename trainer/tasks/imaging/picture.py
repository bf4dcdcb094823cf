"""Read a picture file as a validation does.

The picture is turned upright by its EXIF orientation. It becomes RGB in 8 bits: transparent pixels
become white, and values of 16 bits are divided by 256. Then it is resized so that its shorter side
has `resize` pixels, and the centre of `size` x `size` pixels is cut out.
"""

# `trainbox export` writes a copy of this file beside a model, so it imports nothing of Trainbox.

import struct
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

# Shape suffixes: H height, W width.

Box = tuple[float, float, float, float]  # left, top, right and bottom in pixels

# What Pillow raises for files that are damaged. An OSError of the system has an errno.
_DAMAGE = (
    *(OSError, SyntaxError, ValueError, TypeError, IndexError, KeyError, EOFError),
    *(OverflowError, struct.error, Image.DecompressionBombError),
)

# How to turn a picture upright, by the EXIF orientation of the file.
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)


def load_picture(path: Path, size: int, resize: int) -> Tensor:
    """Return the centre of a picture as (`size`, `size`, 3) uint8, without augmentation.

    The shorter side of the whole picture would have `resize` pixels.

    Raises:
        UnidentifiedImageError: the file cannot be decoded.
    """
    return pixels(region(path, size, lambda width, height: _centre(width, height, size / resize)))


def region(path: Path, size: int, choose: Callable[[int, int], Box]) -> Image.Image:
    """Return a region of the upright RGB picture, resized to `size` x `size`.

    `choose` returns the region for the width and the height of the picture. A JPEG is decoded at a
    half, a quarter or an eighth of its size if this is enough for the region.
    """
    try:
        with Image.open(path) as image:
            # Pillow turns TIFF files itself.
            turn = 1 if image.format == "TIFF" else image.getexif().get(_ORIENTATION, 1)
            across, down = image.size
            width, height = (down, across) if turn in _SIDEWAYS else (across, down)
            box = choose(width, height)
            least = size / min(box[2] - box[0], box[3] - box[1])
            image.draft(None, (max(1, int(across * least)), max(1, int(down * least))))
            picture = _rgb(image)
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).splitlines()[0] if str(error) else "no data"
        raise UnidentifiedImageError(reason) from error
    if turn in _TURNS:
        picture = picture.transpose(_TURNS[turn])
    x, y = picture.width / width, picture.height / height
    scaled = (box[0] * x, box[1] * y, box[2] * x, box[3] * y)
    return picture.resize((size, size), Image.Resampling.BILINEAR, scaled, reducing_gap=2.0)


def _rgb(image: Image.Image) -> Image.Image:
    """Return the picture in 8-bit RGB. Transparent pixels become white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.has_transparency_data:
        layers = image.convert("RGBA")
        white = Image.new("RGBA", layers.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layers).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint8]]:
    """Return a picture of 16 or 32 bits as (H, W) uint8.

    Raises:
        ValueError: the values are not whole numbers from 0 to 65,535.
    """
    values_HW = numpy.asarray(image)
    if values_HW.dtype.kind == "f":
        raise ValueError("its values are not whole numbers")
    if not (values_HW >= 0).all() or not (values_HW <= 65535).all():
        raise ValueError("its values are not from 0 to 65,535")
    return (values_HW // 256).astype(numpy.uint8)


def _centre(width: int, height: int, share: float) -> Box:
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def pixels(picture: Image.Image) -> Tensor:
    return torch.from_numpy(numpy.array(picture))
