"""The figure of a sweep: its metric by setting, with a point for each trial. Pure."""

import contextlib
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.sweep.grid import Record, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BOX_FROM = 8  # values; the quartiles of fewer say less than the points
_MOST_ROWS = 40  # in the height of a page
_MOST_SHAPES = 1000  # of a file .svg or .pdf, which has a picture of more points
_PANELS_ABREAST = 3
_MOST_CHARS = 100  # of the name of a row
_BLUE = "#1f6fb4"


@dataclass(frozen=True)
class _Point:
    point: Mapping[str, Value]
    value: float


def write_figure(
    file: Path, records: Sequence[Record], goal: tuple[str, str], is_drawn: bool
) -> bool:
    """Write the figure of the trials that are done to `file`, and return whether there are any.

    Each combination of a grid has a row. Where a sampler has drawn the settings (`is_drawn`), each
    setting has a panel.

    Args:
        file: a path whose ending is a format that matplotlib has.
        records: the trials of the sweep.
        goal: `min` or `max`, and the metric.
        is_drawn: whether a sampler has drawn the settings.

    Raises:
        ValueError: matplotlib does not have this format.
    """
    direction, metric = goal
    found = [(r.point, r.metrics.get(metric, math.nan)) for r in records if r.state == "done"]
    # matplotlib cannot draw an axis of larger numbers.
    points = [_Point(point, value) for point, value in found if abs(value) < 1e300]
    if not points:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name can have a character that the font lacks
        draw = _panels if is_drawn and any(each.point for each in points) else _rows
        draw(points, direction, _plain(metric)).savefig(file)
    return True


def _rows(points: Sequence[_Point], direction: str, metric: str) -> Any:
    """Draw a row for each combination: its points, and a box with its quartiles."""
    from matplotlib.figure import Figure

    values: dict[tuple[tuple[str, Value], ...], list[float]] = {}
    for each in points:
        values.setdefault(tuple(each.point.items()), []).append(each.value)
    names = list(values)
    title = ""
    if len(names) > _MOST_ROWS:
        sign = 1 if direction == "min" else -1
        names = sorted(names, key=lambda name: sign * _mean(values[name]))[:_MOST_ROWS]
        title = f"the best {_MOST_ROWS} of {len(values):,} combinations"
    shown = [
        ", ".join(f"{n}={_short(value)}" for n, value in name) or "all trials" for name in names
    ]
    shown = [text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..." for text in shown]
    width = max(7.5, 4.8 + 0.08 * max(map(len, shown)))  # the axis keeps its room beside the names
    figure = Figure(figsize=(width, 1.4 + 0.36 * len(names)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for row, name in enumerate(names):
        found = values[name]
        if len(found) >= _BOX_FROM:
            axes.boxplot(
                [found],
                orientation="horizontal",
                positions=[row],
                widths=0.62,
                showfliers=False,
                medianprops={"color": "black", "linewidth": 1.5},
            )
        else:
            mean = _mean(found)
            axes.plot([mean, mean], [row - 0.31, row + 0.31], color="black", linewidth=1.5)
        _dots(axes, found, [row] * len(found), vertical=True)
    axes.set_yticks(range(len(names)), [_plain(text) for text in shown])
    axes.set_ylim(len(names) - 0.5, -0.5)
    has_box = any(len(values[name]) >= _BOX_FROM for name in names)
    mark = "box: median and quartiles" if has_box else "line: mean"
    axes.set_xlabel(f"{metric} (points: trials; {mark})")
    axes.set_title(title, fontsize="medium")
    axes.grid(axis="x", alpha=0.3)
    return figure


def _panels(points: Sequence[_Point], direction: str, metric: str) -> Any:
    """Draw a panel for each setting: the metric of each trial by its value."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for each in points for name in each.point))
    columns = min(len(names), _PANELS_ABREAST)
    rows = math.ceil(len(names) / columns)
    size = (max(6.0, 4.2 * columns), 4.0 * rows)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    best = (min if direction == "min" else max)(points, key=lambda each: each.value)
    for index, axes in enumerate(grid.flat):
        if index >= len(names):
            axes.set_axis_off()
            continue
        name = names[index]
        given = [each for each in points if name in each.point]
        texts = [each.point[name] for each in given]
        numbers = [number for text in texts if (number := as_number(text)) is not None]
        y = [each.value for each in given]
        ringed = given.index(best) if best in given else None
        if len(numbers) == len(texts):
            _dots(axes, numbers, y, ringed=ringed)
            if 0 < 100 * min(numbers) <= max(numbers):
                axes.set_xscale("log")
        else:
            kinds = list(dict.fromkeys(map(str, texts)))
            x = [kinds.index(str(text)) for text in texts]
            _dots(axes, x, y, horizontal=True, ringed=ringed)
            axes.set_xticks(range(len(kinds)), [_plain(kind) for kind in kinds])
            axes.set_xlim(-0.5, len(kinds) - 0.5)
        axes.set_xlabel(_plain(name))
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set_ylabel(metric)
    figure.suptitle("one point for each trial, a circle around the best", fontsize="medium")
    return figure


def _dots(
    axes: "Axes",
    x: Sequence[float],
    y: Sequence[float],
    vertical: bool = False,
    horizontal: bool = False,
    ringed: int | None = None,
) -> None:
    """Draw points, which spread `vertical` or `horizontal` around their category.

    The point with the index `ringed` has a circle around it.
    """
    shift = random.Random(0)  # noqa: S311 - the same picture each time
    is_many = len(x) > 100
    spread = 0.22 if is_many else 0.1
    x = [value + horizontal * shift.uniform(-spread, spread) for value in x]
    y = [value + vertical * shift.uniform(-spread, spread) for value in y]
    axes.scatter(
        x,
        y,
        s=12 if is_many else 28,
        color=_BLUE,
        alpha=0.35 if is_many else 0.8,
        linewidths=0,
        zorder=3,
        rasterized=len(x) > _MOST_SHAPES,
    )
    if ringed is not None:
        axes.plot(x[ringed], y[ringed], "o", color="black", fillstyle="none", markersize=9)


def as_number(value: Value) -> float | None:
    """Return a setting as a number, or None. The values of a script are numbers in text."""
    if isinstance(value, bool):
        return None
    with contextlib.suppress(ValueError):
        return number if math.isfinite(number := float(value)) else None
    return None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(text: object) -> str:
    """Return a text that matplotlib writes as it is. A name of a file may have other bytes."""
    return str(text).encode(errors="backslashreplace").decode().replace("$", r"\$")
