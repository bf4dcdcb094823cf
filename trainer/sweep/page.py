"""One web page with the results of a sweep: table, parallel coordinates, slices, learning curves.

Pure, except for `read_curves`. The page loads nothing, and a browser shows the charts without
scripts. A script sorts the table and marks one trial in all charts.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainbox.contract.config import split_metric
from trainbox.contract.entries import EntryReader
from trainbox.contract.secret_rule import without_secrets
from trainer.sweep.charts import (
    MOST_AXES,
    Curve,
    colour_of,
    learning_curves,
    parallel_coordinates,
    short_number,
    shown_text,
    slice_chart,
)
from trainer.sweep.grid import Value
from trainer.sweep.results import as_number
from trainer.sweep.trials import Record

# A page with these limits and those of the charts is smaller than 5 MB.
_MOST_CURVES, _MOST_DRAWN, _MOST_ROWS = 300, 2000, 3000
_LARGEST, _LARGEST_VALUE = 2**53, 1e300
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
@media (prefers-color-scheme: dark) { svg .trials { filter: brightness(1.8) } }
.wide { overflow: auto }
.wide svg { min-width: 880px }
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
    ranked = sorted(values, key=lambda number: values[number], reverse=not lowest)
    ranked.reverse()  # the best is last, and of equal trials the first one
    ranks = {values[number]: rank for rank, number in enumerate(ranked)}
    colours = {n: colour_of(ranks[values[n]] / max(1, len(ranked) - 1)) for n in ranked}
    drawn = _sample(ranked, _MOST_DRAWN)
    numbered = {record.number: record for record in records}
    points = {number: numbered[number].point for number in drawn}
    results = {number: values[number] for number in drawn}
    settings = list(dict.fromkeys(setting for record in records for setting in record.point))
    parts = [f"<h1>{shown_text(name)}</h1>", f"<p>{shown_text(_counts(records))}</p>"]
    # The command to train again must be complete.
    parts += [f"<pre>{shown_text(without_secrets(best), len(best) * 2)}</pre>"] if best else []
    if drawn and settings:
        few = f" of {len(drawn):,} of {len(ranked):,} trials" if len(drawn) < len(ranked) else ""
        parts += [
            f"<h2>Parallel coordinates{few}</h2>",
            _wide(parallel_coordinates(points, results, metric, settings, colours)),
        ]
        slices = [slice_chart(s, points, results, metric, colours) for s in settings[:MOST_AXES]]
        parts += [f"<h2>Slices{few}</h2>", f'<div class="slices">{"".join(slices)}</div>']
    others = [number for number in curves if number not in values]
    shown = _sample([n for n in (*others, *ranked) if n in curves], _MOST_CURVES)
    if shown:
        few = f" of {len(shown):,} of {len(curves):,} trials" if len(shown) < len(curves) else ""
        parts += [
            f"<h2>Learning curves{few}</h2>",
            _wide(learning_curves({n: curves[n] for n in shown}, metric, colours)),
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
        f"<title>{shown_text(name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + f'\n<div id="trial"></div>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n'
    )


def _wide(chart: str) -> str:
    """Return a chart that scrolls on a small screen, where its text would be too small."""
    return f'<div class="wide">{chart}</div>'


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


def _table(records: Sequence[Record], settings: Sequence[str]) -> str:
    metrics = list(dict.fromkeys(name for record in records for name in record.metrics))
    names = ["trial", "state", *settings, "seed", *metrics, "seconds", "message"]
    head = "".join(
        f'<th scope="col" title="{shown_text(name)}">{shown_text(name)}</th>' for name in names
    )
    lines = []
    for record in records:
        message = shown_text(record.message)
        cells = [
            f"<td>{record.number}</td>",
            f'<td class="left">{shown_text(record.state)}</td>',
            *(_cell(record.point.get(name, "")) for name in settings),
            f"<td>{record.seed}</td>",
            *(_cell(record.metrics.get(name, "")) for name in metrics),
            _cell("" if record.seconds is None else round(record.seconds, 1)),
            f'<td class="left" title="{message}">{message}</td>' if message else "<td></td>",
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
        return f'<td data-v="{value!r}">{short_number(value)}</td>'
    number = as_number(value)
    key = "" if number is None or isinstance(value, int) else f' data-v="{number!r}"'
    return f"<td{key}>{shown_text(value)}</td>"
