"""One web page with the results of a sweep: table, parallel coordinates, slices, learning curves.

Pure, except for `read_curves`. The page loads nothing, and a browser shows the charts without
scripts. A script sorts the table and marks one trial in all charts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from trainbox.entries import EntryReader
from trainbox.secret_rule import without_secrets
from trainer.settings.config import split_metric
from trainer.sweep.grid import Value
from trainer.sweep.results import as_number
from trainer.sweep.trials import Record

Curve = list[tuple[int, float]]  # steps and values of the metric

# A page with the limits below is smaller than 5 MB.
_MOST_CURVES, _MOST_POINTS = 300, 100
_MOST_DRAWN, _MOST_ROWS = 2000, 3000
_MOST_AXES, _MOST_TICKS, _MOST_LETTERS = 12, 12, 14
_LONGEST_CELL, _LARGEST, _LARGEST_VALUE = 200, 2**53, 1e300
# A scale is logarithmic if the largest value is this many times the smallest.
_LOGS_OF_A_GRID, _LOGS_OF_A_RANGE, _LOGS_OF_A_METRIC = 10.0, 100.0, 1000.0
_FEW_VALUES = 6  # all of them are ticks
# From the worst to the best trial: points of the colour map viridis.
_COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (220, 205, 30))
# The curve of a trial that is not done.
_GREY = "#888888"
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882 }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto 5rem; max-width: 1080px;
  padding: 0 1rem }
h1 { font-size: 1.5rem }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
pre { overflow: auto }
svg { display: block; max-width: 100%; height: auto; font: 12px system-ui, sans-serif }
svg text { fill: currentColor; paint-order: stroke; stroke: Canvas; stroke-width: 4px }
svg .axis { stroke: currentColor; opacity: .5 }
svg .grid { stroke: var(--line) }
svg .t { opacity: .75 }
svg polyline.t { fill: none; stroke-width: 1.5 }
.marked svg .t { opacity: .08 }
.marked svg .t.m { opacity: 1; stroke-width: 3.5 }
.slices { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 1rem }
.table { overflow: auto; max-height: 36rem; border: 1px solid var(--line) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; max-width: 20rem;
  overflow: hidden; text-overflow: ellipsis }
th { position: sticky; top: 0; background: Canvas; cursor: pointer }
th[aria-sort=ascending]::after { content: " \\25B2" }
th[aria-sort=descending]::after { content: " \\25BC" }
tr.m td { background: var(--soft); font-weight: 600 }
.left { text-align: left }
#trial { position: fixed; inset: auto 0 0 0; padding: .5rem 1rem; background: Canvas;
  border-top: 1px solid var(--line); text-align: center }
#trial:empty { display: none }
"""
_SCRIPT = """
const body = document.body, table = document.querySelector("table");
const heads = [...table.querySelectorAll("th")], shown = document.querySelector("#trial");
let kept = null;
function mark(trial) {
  body.classList.toggle("marked", trial !== null);
  document.querySelectorAll(".m").forEach(part => part.classList.remove("m"));
  document.querySelectorAll(`[data-t="${trial}"]`).forEach(part => part.classList.add("m"));
  const row = table.querySelector(`tr[data-t="${trial}"]`);
  const texts = row ? [...row.cells].map(cell => cell.textContent) : [];
  const named = texts.map((text, i) => text && `${heads[i].textContent} ${text}`);
  shown.textContent = named.filter(Boolean).join(", ");
}
const trialOf = event => event.target.closest("[data-t]")?.dataset.t ?? null;
body.addEventListener("mouseover", event => mark(trialOf(event) ?? kept));
body.addEventListener("click", event => {
  if (event.target.closest("th")) return;
  kept = trialOf(event) === kept ? null : trialOf(event);
  mark(kept);
});
heads.forEach((head, column) => head.addEventListener("click", () => {
  const down = head.getAttribute("aria-sort") === "ascending";
  heads.forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => row.cells[column].dataset.v ?? row.cells[column].textContent;
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort((one, other) => {
    const [a, b] = [key(one), key(other)];
    if (a === "" || b === "") return (a === "") - (b === "");
    const order = isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
    return down ? -order : order;
  }));
}));
"""


@dataclass(frozen=True)
class _Scale:
    """Maps values to 0 to 1, and has some values with their labels as ticks."""

    positions: Mapping[Value, float]
    ticks: Sequence[tuple[float, str]]

    def at(self, value: Value) -> float:
        return self.positions[value]


def read_curves(folder: Path, records: Sequence[Record], metric: str) -> dict[int, Curve]:
    """Return the metric over the steps for each trial that has more than one value of it."""
    curves = {}
    for record in records:
        found: dict[bool, dict[int, float]] = {True: {}, False: {}}
        for entry in EntryReader(folder / f"trial-{record.number:05d}" / "metrics.jsonl").read():
            step, value = entry.get("step"), _finite(entry.get(metric))
            if type(step) is int and abs(step) < _LARGEST and value is not None:
                found[entry.get("kind") == "validation"][step] = value
        # A task also reports a training loss, but its trials are compared by validations.
        points = sorted((found[True] or found[False]).items())
        if len(points) > 1:
            curves[record.number] = points
    return curves


def _finite(value: object) -> float | None:
    """Return a number that a chart can show, or None."""
    if isinstance(value, int | float) and -_LARGEST_VALUE < value < _LARGEST_VALUE:
        return float(value)
    return None


def page(
    name: str,
    records: Sequence[Record],
    metric: str,
    requested: str | None,
    best: str,
    curves: Mapping[int, Curve],
) -> str:
    """Return the page as HTML.

    Args:
        name: the name of the sweep.
        records: its trials.
        metric: the name of the metric to show.
        requested: the metric that ranks the trials, which can begin with `min:` or `max:`.
        best: the lines about the best combination.
        curves: the learning curves by trial.
    """
    lowest = split_metric(requested or metric, "--metric")[0] == "min"
    values = {
        r.number: value
        for r in records
        if r.state == "done" and math.isfinite(value := r.metrics.get(metric, math.nan))
    }
    ranked = sorted(values, key=lambda number: values[number], reverse=lowest)  # the best is last
    colours = {n: _colour(i / max(1, len(ranked) - 1)) for i, n in enumerate(ranked)}
    drawn = _sample(ranked, _MOST_DRAWN)
    numbered = {record.number: record for record in records}
    points = {number: numbered[number].point for number in drawn}
    results = {number: values[number] for number in drawn}
    settings = list(dict.fromkeys(setting for record in records for setting in record.point))
    parts = [f"<h1>{_text(name)}</h1>", f"<p>{_text(_counts(records))}</p>"]
    parts += [f"<pre>{_text(without_secrets(best))}</pre>"] if best else []
    if drawn and settings:
        few = f" of {len(drawn):,} of {len(ranked):,} trials" if len(drawn) < len(ranked) else ""
        parts += [
            f"<h2>Parallel coordinates{few}</h2>",
            _parallel(points, results, metric, settings, colours),
        ]
        slices = [_slice(s, points, results, metric, colours) for s in settings[:_MOST_AXES]]
        parts += [f"<h2>Slices{few}</h2>", f'<div class="slices">{"".join(slices)}</div>']
    others = [number for number in curves if number not in values]
    shown = _sample([n for n in (*others, *ranked) if n in curves], _MOST_CURVES)
    if shown:
        few = f" of {len(shown):,} of {len(curves):,} trials" if len(shown) < len(curves) else ""
        parts += [
            f"<h2>Learning curves{few}</h2>",
            _curves({n: curves[n] for n in shown}, metric, colours),
        ]
    order = [*reversed(ranked), *(r.number for r in records if r.number not in values)]
    few = f", the best {_MOST_ROWS:,} of {len(order):,}" if len(order) > _MOST_ROWS else ""
    listed = [numbered[number] for number in order[:_MOST_ROWS]]
    parts += [f"<h2>Trials{few}</h2>", _table(listed, settings)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + f'\n<div id="trial"></div>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n'
    )


def _sample(ranked: Sequence[int], most: int) -> list[int]:
    """Return about `most` of the trials, evenly spread over the ranks, with the best one."""
    stride = math.ceil(len(ranked) / most) or 1
    return list(reversed(ranked[::-1][::stride]))


def _counts(records: Sequence[Record]) -> str:
    states = ("done", "failed", "pruned", "running", "pending")
    counts = {state: sum(record.state == state for record in records) for state in states}
    listed = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    colours = "Colours: from the worst (dark) to the best trial (yellow)."
    return f"{len(records):,} trials: {listed}. {colours}"


def _parallel(
    points: Mapping[int, Mapping[str, Value]],
    results: Mapping[int, float],
    metric: str,
    settings: Sequence[str],
    colours: Mapping[int, str],
) -> str:
    width, height, top, bottom, side = 1040, 340, 34, 16, 70
    axes = [*settings[: _MOST_AXES - 1], metric]
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
    for i, (name, scale) in enumerate(zip(axes, scales, strict=True)):
        x = side + i * gap
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y(1):.1f}" y2="{y(0):.1f}"/>'
        )
        parts.append(_label(x, 16, name, "middle", "600"))
        for share, text in scale.ticks:
            parts.append(_label(x - 6, y(share) + 4, text, "end"))
    return _svg(width, height, "parallel coordinates", parts)


def _slice(
    setting: str,
    points: Mapping[int, Mapping[str, Value]],
    results: Mapping[int, float],
    metric: str,
    colours: Mapping[int, str],
) -> str:
    across = _scale_of_setting([point.get(setting, "") for point in points.values()])
    up = _scale(list(results.values()), _LOGS_OF_A_METRIC)
    plot = _Plot(340, 250, across, up, setting, metric)
    circles = [
        f'<circle class="t" data-t="{number}" cx="{plot.x(across.at(point.get(setting, ""))):.1f}" '
        f'cy="{plot.y(up.at(results[number])):.1f}" r="4" fill="{colours[number]}"/>'
        for number, point in points.items()
    ]
    return plot.svg(circles)


def _curves(curves: Mapping[int, Curve], metric: str, colours: Mapping[int, str]) -> str:
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


def _thinned(curve: Curve) -> Curve:
    """Return at most about `_MOST_POINTS` of the points, with the first and the last one."""
    stride = math.ceil(len(curve) / _MOST_POINTS)
    return curve if stride == 1 else [*curve[:-1:stride], curve[-1]]


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
            for share, text in self.up.ticks
        ]
        parts += [
            _label(self.x(share), low + 17, text, "middle") for share, text in self.across.ticks
        ]
        parts += [
            f'<path class="axis" fill="none" d="M{left:.1f},{high:.1f}V{low:.1f}H{right:.1f}"/>',
            _label((left + right) / 2, self.height - 5, self.across_name, "middle", "600"),
            _label(4, 13, self.up_name, "start", "600"),
        ]
        title = f"{self.up_name} over {self.across_name}"
        return _svg(self.width, self.height, title, [*parts, *marks])


def _scale_of_setting(values: Sequence[Value]) -> _Scale:
    """Return the scale of a setting. All values of a grid are ticks."""
    numbers = {value: as_number(value) for value in values}
    if None in numbers.values() or len(numbers) > _FEW_VALUES:
        return _scale(values, _LOGS_OF_A_RANGE)
    at = _scale(values, _LOGS_OF_A_GRID).positions
    return _Scale(at, [(at[value], _figure(float(value))) for value in numbers])


def _scale(values: Sequence[Value], logs_above: float) -> _Scale:
    """Return a scale of numbers or of categories.

    Positive numbers whose largest is `logs_above` times the smallest or more have logarithms.
    """
    found = list(dict.fromkeys(values))
    numbers = {value: number for value in found if (number := as_number(value)) is not None}
    if len(numbers) < len(found):
        at = {value: (i + 0.5) / len(found) for i, value in enumerate(found)}
        stride = math.ceil(len(found) / _MOST_TICKS)
        return _Scale(at, [(at[value], str(value)) for value in found[::stride]])
    low, high = min(numbers.values()), max(numbers.values())
    if low == high:
        return _Scale(dict.fromkeys(found, 0.5), [(0.5, _figure(low))])
    logs = low > 0 and high >= logs_above * low
    begin, end = (math.log(low), math.log(high)) if logs else (low, high)

    def share(number: float) -> float:
        return ((math.log(number) if logs else number) - begin) / (end - begin)

    if logs and high >= 100 * low:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        ticks = [10.0**power for power in powers]
    else:
        ticks = _round_ticks(low, high)
    at = {value: share(number) for value, number in numbers.items()}
    return _Scale(at, [(share(tick), _figure(tick)) for tick in ticks])


def _round_ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers from `low` to `high`."""
    if not 0 < (high - low) / 3 < math.inf:
        return [low, high]
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(power * part for part in (5, 2, 1) if power * part <= (high - low) / 3)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _table(records: Sequence[Record], settings: Sequence[str]) -> str:
    metrics = list(dict.fromkeys(name for record in records for name in record.metrics))
    names = ["trial", "state", *settings, "seed", *metrics, "seconds", "message"]
    head = "".join(f'<th scope="col" title="{_text(name)}">{_text(name)}</th>' for name in names)
    lines = []
    for record in records:
        cells = [
            f"<td>{record.number}</td>",
            f'<td class="left">{_text(record.state)}</td>',
            *(_cell(record.point.get(name, "")) for name in settings),
            f"<td>{record.seed}</td>",
            *(_cell(record.metrics.get(name, "")) for name in metrics),
            _cell("" if record.seconds is None else round(record.seconds, 1)),
            f'<td class="left" title="{_text(record.message)}">{_text(record.message)}</td>'
            if record.message
            else "<td></td>",
        ]
        lines.append(f'<tr data-t="{record.number}">{"".join(cells)}</tr>')
    body = "\n".join(lines)
    return (
        f'<div class="table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _cell(value: Value) -> str:
    """Return a cell. A number is shown with few digits and sorted with all."""
    if isinstance(value, float):
        return f'<td data-v="{value!r}">{_figure(value)}</td>'
    number = as_number(value)
    key = "" if number is None or isinstance(value, int) else f' data-v="{number!r}"'
    return f"<td{key}>{_text(value)}</td>"


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    content = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{_text(title)}">\n{content}\n</svg>'
    )


def _label(x: float, y: float, text: str, anchor: str, weight: str = "400") -> str:
    short = (
        text
        if len(text) <= _MOST_LETTERS
        else f"{text[: _MOST_LETTERS - 1]}\N{HORIZONTAL ELLIPSIS}"
    )
    whole = f"<title>{_text(text)}</title>" if short != text else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{_text(short)}{whole}</text>"
    )


def _colour(share: float) -> str:
    """Return the colour of a trial: 0 is the worst, 1 the best."""
    at = share * (len(_COLOURS) - 1)
    first = min(int(at), len(_COLOURS) - 2)
    pairs = zip(_COLOURS[first], _COLOURS[first + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - first)):02x}" for a, b in pairs)


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _text(value: object) -> str:
    """Return a text as HTML shows it, without characters that UTF-8 does not have."""
    text = str(value).encode(errors="backslashreplace").decode()
    cut = text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]} ..."
    return escape(cut)
