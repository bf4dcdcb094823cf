"""Charts of the trials of a sweep, as SVG: parallel coordinates, slices, learning curves."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainbox.contract.markup import escaped
from trainer.sweep.grid import Value
from trainer.sweep.results import as_number

Curve = list[tuple[int, float]]  # steps and values of the metric

MOST_AXES = 12
_MOST_POINTS, _MOST_TICKS, _MOST_LETTERS = 100, 12, 14
_LETTER, _LINE = 7.0, 13.0  # the width and the height that a letter needs at most
_LONGEST_TEXT = 200
# A scale is logarithmic if the largest value is this many times the smallest.
_LOGS_OF_A_GRID, _LOGS_OF_A_RANGE, _LOGS_OF_A_METRIC = 10.0, 100.0, 1000.0
_FEW_VALUES = 6  # all of them are ticks
# From the worst to the best trial: points of the colour map viridis.
_COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (220, 205, 30))
# The curve of a trial that is not done.
_GREY = "#888888"


def parallel_coordinates(
    points: Mapping[int, Mapping[str, Value]],
    results: Mapping[int, float],
    metric: str,
    settings: Sequence[str],
    colours: Mapping[int, str],
) -> str:
    """Return a chart with an axis for each setting and for the metric, and a line for each trial.

    `points` has the settings, `results` the metric and `colours` the colour of each trial.
    """
    width, height, top, bottom, side = 1040, 340, 34, 16, 70
    axes = [*settings[:MOST_AXES], metric]
    columns = [[point.get(name, "") for point in points.values()] for name in axes[:-1]]
    scales = [_scale_of_setting(column) for column in columns]
    scales.append(_scale(list(results.values()), _LOGS_OF_A_METRIC))
    gap = (width - 2 * side) / max(1, len(axes) - 1)

    def y(share: float) -> float:
        return height - bottom - share * (height - top - bottom)

    parts = []
    for number, point in points.items():
        values: list[Value] = [*(point.get(name, "") for name in axes[:-1]), results[number]]
        at = " ".join(
            f"{side + i * gap:.1f},{y(scale.at(value)):.1f}"
            for i, (scale, value) in enumerate(zip(scales, values, strict=True))
        )
        parts.append(
            f'<polyline class="t" data-t="{number}" points="{at}" stroke="{colours[number]}"/>'
        )
    parts = [_group(parts)]
    for i, (name, scale) in enumerate(zip(axes, scales, strict=True)):
        x = side + i * gap
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y(1):.1f}" y2="{y(0):.1f}"/>'
        )
        parts.append(_label(x, 16, name, "middle", "600"))
        for share, text in _apart(scale.ticks, y(0) - y(1), _one_line):
            parts.append(_label(x - 6, y(share) + 4, text, "end"))
    return _svg(width, height, "parallel coordinates", parts)


def slice_chart(
    setting: str,
    points: Mapping[int, Mapping[str, Value]],
    results: Mapping[int, float],
    metric: str,
    colours: Mapping[int, str],
) -> str:
    """Return a chart of the metric over one setting.

    The other arguments are those of `parallel_coordinates`.
    """
    across = _scale_of_setting([point.get(setting, "") for point in points.values()])
    up = _scale(list(results.values()), _LOGS_OF_A_METRIC)
    plot = _Plot(340, 250, across, up, setting, metric)
    circles = [
        f'<circle class="t" data-t="{number}" cx="{plot.x(across.at(point.get(setting, ""))):.1f}" '
        f'cy="{plot.y(up.at(results[number])):.1f}" r="4" fill="{colours[number]}"/>'
        for number, point in points.items()
    ]
    return plot.svg(circles)


def learning_curves(curves: Mapping[int, Curve], metric: str, colours: Mapping[int, str]) -> str:
    """Return a chart of the metric over the steps. A trial without a colour is grey."""
    thinned = {number: _thinned(curve) for number, curve in curves.items()}
    steps = _scale([step for curve in thinned.values() for step, _ in curve], math.inf)
    values = _scale([value for curve in thinned.values() for _, value in curve], _LOGS_OF_A_METRIC)
    plot = _Plot(1040, 380, steps, values, "step", metric)
    lines = []
    for number, curve in thinned.items():
        at = " ".join(f"{plot.x(steps.at(s)):.1f},{plot.y(values.at(v)):.1f}" for s, v in curve)
        colour = colours.get(number, _GREY)
        lines.append(f'<polyline class="t" data-t="{number}" points="{at}" stroke="{colour}"/>')
    return plot.svg(lines)


def colour_of(share: float) -> str:
    """Return the colour of a trial: 0 is the worst, 1 the best."""
    at = share * (len(_COLOURS) - 1)
    first = min(int(at), len(_COLOURS) - 2)
    pairs = zip(_COLOURS[first], _COLOURS[first + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - first)):02x}" for a, b in pairs)


def short_number(value: float) -> str:
    """Return a number with four digits."""
    return f"{value:.4g}"


def shown_text(value: object, longest: int = _LONGEST_TEXT) -> str:
    """Return a text as HTML shows it, cut if it is long."""
    text = str(value)
    return escaped(text if len(text) <= longest else f"{text[:longest]} ...")


@dataclass(frozen=True)
class _Scale:
    """Maps values to 0 to 1, and has some values with their labels as ticks."""

    positions: Mapping[Value, float]
    ticks: Sequence[tuple[float, str]]
    has_names: bool = False

    def at(self, value: Value) -> float:
        return self.positions[value]


@dataclass(frozen=True)
class _Plot:
    """The frame of a chart with two axes."""

    width: int
    height: int
    across: _Scale
    up: _Scale
    across_name: str
    up_name: str

    def x(self, share: float) -> float:
        return 64 + share * (self.width - 64 - 24)

    def y(self, share: float) -> float:
        return self.height - 46 - share * (self.height - 46 - 30)

    def svg(self, marks: Sequence[str]) -> str:
        left, right, low, high = self.x(0) - 8, self.x(1) + 8, self.y(0) + 8, self.y(1) - 8
        parts = [
            f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{self.y(share):.1f}" '
            f'y2="{self.y(share):.1f}"/>' + _label(left - 5, self.y(share) + 4, text, "end")
            for share, text in _apart(self.up.ticks, self.y(0) - self.y(1), _one_line)
        ]
        room = self.x(1) - self.x(0)
        # Names are shortened until all fit, and numbers are left out.
        most = max(4, int(room / _LETTER / len(self.across.ticks)) - 1)
        letters = min(most, _MOST_LETTERS) if self.across.has_names else _MOST_LETTERS

        def width(text: str) -> float:
            return (min(len(text), letters) + 1) * _LETTER

        parts += [
            _label(self.x(share), low + 17, text, "middle", letters=letters)
            for share, text in _apart(self.across.ticks, room, width)
        ]
        parts += [
            f'<path class="axis" fill="none" d="M{left:.1f},{high:.1f}V{low:.1f}H{right:.1f}"/>',
            _label((left + right) / 2, self.height - 5, self.across_name, "middle", "600"),
            _label(4, 13, self.up_name, "start", "600"),
        ]
        title = f"{self.up_name} over {self.across_name}"
        return _svg(self.width, self.height, title, [*parts, _group(marks)])


def _thinned(curve: Curve) -> Curve:
    """Return at most about `_MOST_POINTS` of the points, with the first and the last one."""
    stride = math.ceil(len(curve) / _MOST_POINTS)
    return curve if stride == 1 else [*curve[:-1:stride], curve[-1]]


def _scale_of_setting(values: Sequence[Value]) -> _Scale:
    """Return the scale of a setting. All values of a grid are ticks."""
    numbers = {value: as_number(value) for value in values}
    if None in numbers.values() or len(numbers) > _FEW_VALUES:
        return _scale(values, _LOGS_OF_A_RANGE)
    at = _scale(values, _LOGS_OF_A_GRID).positions
    return _Scale(at, [(at[value], short_number(float(value))) for value in numbers])


def _scale(values: Sequence[Value], logs_above: float) -> _Scale:
    """Return a scale of numbers or of categories.

    Positive numbers whose largest is `logs_above` times the smallest or more have logarithms.
    """
    found = list(dict.fromkeys(values))
    numbers = {value: number for value in found if (number := as_number(value)) is not None}
    if len(numbers) < len(found):
        at = {value: (i + 0.5) / len(found) for i, value in enumerate(found)}
        stride = math.ceil(len(found) / _MOST_TICKS)
        return _Scale(at, [(at[value], str(value)) for value in found[::stride]], has_names=True)
    low, high = min(numbers.values()), max(numbers.values())
    if low == high:
        return _Scale(dict.fromkeys(found, 0.5), [(0.5, short_number(low))])
    logs = low > 0 and high >= logs_above * low
    begin, end = (math.log(low), math.log(high)) if logs else (low, high)

    def share(number: float) -> float:
        return ((math.log(number) if logs else number) - begin) / (end - begin)

    if logs and high >= 100 * low:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        ticks = [10.0**power for power in powers[:: math.ceil(len(powers) / _MOST_TICKS)]]
    else:
        ticks = _round_ticks(low, high)
    at = {value: share(number) for value, number in numbers.items()}
    return _Scale(at, [(share(tick), short_number(tick)) for tick in ticks])


def _apart(
    ticks: Sequence[tuple[float, str]], room: float, size: Callable[[str], float]
) -> list[tuple[float, str]]:
    """Return every tick, every second one and so on, so that no labels overlap.

    `room` is the length of the axis in pixels, and `size` returns that of a label.
    """
    ordered = sorted(ticks)
    at = {tick: tick[0] * room for tick in ordered}
    for stride in range(1, len(ordered)):
        kept = ordered[::stride]
        if all(
            at[low] + size(low[1]) / 2 <= at[high] - size(high[1]) / 2
            for low, high in itertools.pairwise(kept)
        ):
            return kept
    return ordered[:1]


def _one_line(_text: str) -> float:
    return _LINE


def _round_ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers from `low` to `high`."""
    if not 0 < (high - low) / 3 < math.inf:
        return [low, high]
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(power * part for part in (5, 2, 1) if power * part <= (high - low) / 3)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    content = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{shown_text(title)}">\n{content}\n</svg>'
    )


def _group(marks: Sequence[str]) -> str:
    """Return the marks of the trials as a group, whose colours are lighter on a dark page."""
    content = "\n".join(marks)
    return f'<g class="trials">\n{content}\n</g>'


def _label(
    x: float,
    y: float,
    text: str,
    anchor: str,
    weight: str = "400",
    letters: int = _MOST_LETTERS,
) -> str:
    short = text if len(text) <= letters else f"{text[: letters - 1]}\N{HORIZONTAL ELLIPSIS}"
    whole = f"<title>{shown_text(text)}</title>" if short != text else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{shown_text(short)}{whole}</text>"
    )
