"""Pictures for TensorBoard, as (3, H, W) uint8 tensors."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from trainbox.processes.streams import printable

if TYPE_CHECKING:
    # This import takes most of a second, so it is done only where a curve is drawn.
    from matplotlib.figure import Figure

# Shape suffixes: B examples, C channels, H height, W width, K classes.

# A picture (3, H, W) uint8, or a function that draws one.
Picture = Tensor | Callable[[], Tensor]

_INK, _PAPER, _GOOD, _BAD = (32, 32, 32), (255, 255, 255), (0, 110, 50), (190, 20, 20)
_FULL_CELL = (23, 78, 166)
_FEW_CLASSES = 40


def confusion_matrix(confusion_KK: Tensor, class_names: Sequence[str]) -> Tensor:
    """Draw a confusion matrix (K, K) with the counts, shaded by their share of the row.

    Rows are true classes, and columns are predicted classes. `class_names` has K names. With more
    than 40 classes, the cells are half as large.
    """
    class_names = [*map(printable, class_names)]  # a line break cannot be drawn in every font
    classes = len(class_names)
    scale = 2 if classes <= _FEW_CLASSES else 1
    cell = 44 * scale
    font, small = _font(13 * scale, class_names), _font(10 * scale, class_names)
    widest = cell - 8 * scale
    margin = 30 * scale + round(max(font.getlength(name) for name in class_names))
    size = margin + cell * classes
    picture = Image.new("RGB", (size + 14 * scale, size + 14 * scale), _PAPER)
    draw = ImageDraw.Draw(picture)
    share_KK = (confusion_KK / confusion_KK.sum(1, keepdim=True).clamp(min=1)).tolist()
    for row in range(classes):
        y = margin + row * cell
        draw.text((margin - 8 * scale, y + cell / 2), class_names[row], _INK, font, anchor="rm")
        for column in range(classes):
            x, share = margin + column * cell, share_KK[row][column]
            shade = tuple(
                round(paper + (full - paper) * share)
                for paper, full in zip(_PAPER, _FULL_CELL, strict=True)
            )
            draw.rectangle((x, y, x + cell - 2, y + cell - 2), fill=shade, outline=(225, 225, 225))
            if count := int(confusion_KK[row, column]):
                text = f"{count}" if count < 10**6 else f"{count:.1e}"
                draw.text(
                    (x + cell / 2, y + cell / 2),
                    text,
                    _PAPER if share > 0.5 else _INK,
                    font if font.getlength(text) <= widest else small,
                    anchor="mm",
                )
    for column, name in enumerate(class_names):
        _upright_text(picture, name, margin + column * cell + cell // 2, margin - 8 * scale, font)
    draw.text((4 * scale, 4 * scale), "true \\ predicted", (130, 130, 130), font)
    return _to_tensor(picture)


def example_sheet(
    images_BCHW: Tensor, labels_B: Tensor, predictions_B: Tensor, class_names: Sequence[str]
) -> Tensor:
    """Draw images with their predicted class below.

    `images_BCHW` are floats of any range with C = 1 or 3. Each image is scaled to its own range.
    `labels_B` and `predictions_B` are (B,) indices of `class_names`. If the prediction is wrong, it
    is red, and the true class follows.
    """
    tile, text, gap, columns = 168, 68, 16, 8
    font = _font(24, class_names)
    rows = -(-len(images_BCHW) // columns)
    picture = Image.new(
        "RGB", (columns * (tile + gap) + gap, rows * (tile + text + gap) + gap), _PAPER
    )
    draw = ImageDraw.Draw(picture)
    for i, (image_CHW, label, prediction) in enumerate(
        zip(images_BCHW.float().cpu(), labels_B.tolist(), predictions_B.tolist(), strict=True)
    ):
        x, y = gap + i % columns * (tile + gap), gap + i // columns * (tile + text + gap)
        low, high = image_CHW.min(), image_CHW.max()
        grey = ((image_CHW - low) / (high - low).clamp(min=1e-6) * 255).byte()
        pixels_HWC = grey.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
        picture.paste(
            Image.fromarray(pixels_HWC).resize((tile, tile), Image.Resampling.NEAREST), (x, y)
        )
        right = label == prediction
        for line, caption in enumerate(
            [class_names[prediction]]
            if right
            else [class_names[prediction], f"not {class_names[label]}"]
        ):
            position = (x + tile / 2, y + tile + 8 + 28 * line)
            draw.text(
                position,
                _fit(caption, font, tile + 12),
                _GOOD if right else _BAD,
                font,
                anchor="ma",
            )
    return _to_tensor(picture)


def from_figure(figure: "Figure") -> Tensor:
    """Return a matplotlib `Figure` as a picture.

    Create the figure as `Figure(...)`, without pyplot. Its size in pixels is its size in inches
    times its dpi.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return torch.from_numpy(numpy.asarray(canvas.buffer_rgba())[:, :, :3].copy()).permute(2, 0, 1)


def write_png(file: Path | IO[bytes], picture_CHW: Tensor) -> None:
    """Write a picture (1, 3 or 4, H, W) as PNG: uint8, or floats from 0 to 1.

    Raises:
        OSError: the file cannot be written.
    """
    if picture_CHW.is_floating_point():
        picture_CHW = (picture_CHW.clamp(0, 1) * 255).round()
    values_HWC = picture_CHW.to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    values = values_HWC.squeeze(2) if values_HWC.shape[2] == 1 else values_HWC
    Image.fromarray(values).save(file, "PNG")


def _font(size: int, names: Sequence[str]) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return a font that can write `names`.

    Pillow's font has only ASCII. The font in matplotlib's folder has the letters of Europe and of
    the Middle East.
    """
    if all(name.isascii() for name in names):
        return ImageFont.load_default(size)
    spec = importlib.util.find_spec("matplotlib")
    assert spec is not None and spec.origin is not None
    return ImageFont.truetype(
        Path(spec.origin).with_name("mpl-data") / "fonts/ttf/DejaVuSans.ttf", size
    )


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    while font.getlength(text) > width:
        text = text[:-2] + "…"
    return text


def _upright_text(
    picture: Image.Image,
    text: str,
    x: int,
    bottom: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """Draw `text` rotated by 90 degrees, centred at `x` and with its start at `bottom`."""
    ascent_and_descent = round(font.getbbox("Ag")[3]) + 3
    strip = Image.new("RGB", (round(font.getlength(text)) + 2, ascent_and_descent), _PAPER)
    ImageDraw.Draw(strip).text((0, 1), text, _INK, font)
    turned = strip.rotate(90, expand=True)
    picture.paste(turned, (x - turned.width // 2, bottom - turned.height))


def _to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1)
