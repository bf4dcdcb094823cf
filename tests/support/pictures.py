"""Made-up pictures of simple shapes, each class in a folder of its own, for the task `images`."""

import math
import random
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

SIDE = 32
# The fields of the task `images` for a small training on the pictures in `shapes`, and of its kinds
# with the labels that `write_labels` writes.
FIELDS = {"folder": "shapes", "model": "shufflenet_v2_x0_5", "size": SIDE}
REGRESSION = {**FIELDS, "label_column": "number"}
MULTILABEL = {**FIELDS, "label_column": "tags"}

_Point = tuple[float, float]


def make_pictures(
    folder: Path, classes: Sequence[str], per_class: int, seed: int, size: int = SIDE
) -> list[Path]:
    """Write `per_class` pictures of each class as `folder/CLASS/NUMBER.jpg`; return their paths.

    The class at index k shows the shape number k of `SHAPES`. Its colour, position, size and
    rotation, the background and the noise are drawn from (`seed`, class, number), so more pictures
    leave the others as they are. A picture is `size` x `size` pixels.
    """
    paths = []
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            paths.append(folder / name / f"{number:04}.jpg")
            picture(k, f"{seed} {name} {number}", size).save(paths[-1], quality=90)
    return paths


def write_labels(folder: Path, paths: Sequence[Path]) -> None:
    """Write `folder`/labels.csv with a class, a number and up to two tags for each picture."""
    rows = ["file,class,number,tags"]
    for path in paths:
        kind, number = path.parent.name, int(path.stem)
        tags = [kind, "even"] if number % 2 == 0 else [kind]
        rows.append(f"{path.relative_to(folder)},{kind},{len(kind) + number / 8},{';'.join(tags)}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def picture(shape: int, seed: str, size: int = SIDE) -> Image.Image:
    """Return an RGB picture of the shape number `shape`, which depends only on the arguments."""
    draw = random.Random(seed)  # noqa: S311 - not a secret
    dark, light = ([draw.randrange(low, low + 90) for _ in "RGB"] for low in (0, 165))
    if draw.random() < 0.5:
        dark, light = light, dark
    # Draw four times as large, so that the edges are smooth at the real size.
    canvas = Image.new("RGB", (4 * size, 4 * size), tuple(dark))
    radius = 4 * size * draw.uniform(0.22, 0.36)
    centre = tuple(draw.uniform(radius, 4 * size - radius) for _ in "xy")
    SHAPES[shape](ImageDraw.Draw(canvas), centre, radius, draw.uniform(0, 360), tuple(light))
    grain = Image.frombytes("L", (size, size), draw.randbytes(size * size)).convert("RGB")
    return Image.blend(canvas.resize((size, size), Image.Resampling.BOX), grain, 0.1)


def _disc(
    draw: ImageDraw.ImageDraw, centre: _Point, radius: float, turn: float, colour: tuple[int, ...]
) -> None:
    draw.circle(centre, radius, fill=colour)


def _cross(
    draw: ImageDraw.ImageDraw, centre: _Point, radius: float, turn: float, colour: tuple[int, ...]
) -> None:
    for angle in (turn, turn + 90):
        _bar(draw, centre, radius, angle, radius / 2.5, colour)


def _stripes(
    draw: ImageDraw.ImageDraw, centre: _Point, radius: float, turn: float, colour: tuple[int, ...]
) -> None:
    for shift in (-0.8, 0, 0.8):
        aside = _around(centre, shift * radius, turn + 90)
        _bar(draw, aside, radius, turn, radius / 3, colour)


def _ring(
    draw: ImageDraw.ImageDraw, centre: _Point, radius: float, turn: float, colour: tuple[int, ...]
) -> None:
    draw.circle(centre, radius, outline=colour, width=round(radius / 3))


def _triangle(
    draw: ImageDraw.ImageDraw, centre: _Point, radius: float, turn: float, colour: tuple[int, ...]
) -> None:
    draw.regular_polygon((*centre, radius), 3, turn, fill=colour)


def _dots(
    draw: ImageDraw.ImageDraw, centre: _Point, radius: float, turn: float, colour: tuple[int, ...]
) -> None:
    for k in range(4):
        draw.circle(_around(centre, 0.8 * radius, turn + 90 * k), radius / 3, fill=colour)


SHAPES = (_disc, _cross, _stripes, _ring, _triangle, _dots)


def _around(centre: _Point, distance: float, angle: float) -> _Point:
    x, y = centre
    return (
        x + distance * math.cos(math.radians(angle)),
        y + distance * math.sin(math.radians(angle)),
    )


def _bar(
    draw: ImageDraw.ImageDraw,
    centre: _Point,
    radius: float,
    angle: float,
    width: float,
    colour: tuple[int, ...],
) -> None:
    ends = (_around(centre, radius, angle), _around(centre, radius, angle + 180))
    draw.line(ends, fill=colour, width=round(width))
