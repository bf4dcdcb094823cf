"""The results of a sweep: a table of its combinations, CSV of its trials, and a figure.

Pure, except for `write_csv`. `figure` imports matplotlib when it is called.
"""

import csv
import io
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbox.contract.config import split_metric
from trainbox.contract.errors import WrongUse
from trainer.sweep.grid import Value
from trainer.sweep.trials import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A metric with one of these names in its own name is a share, with values from 0 to 1.
_SHARES = {
    "accuracy",
    "f1",
    "precision",
    "recall",
    "auc",
    "auroc",
    "iou",
    "dice",
    "sensitivity",
    "specificity",
}


@dataclass(frozen=True)
class CombinationRow:
    """A combination: its trials counted by state, and a metric of those that are done."""

    point: dict[str, Value]
    counts: dict[str, int]
    mean: float
    deviation: float
    interval: tuple[float, float]  # 95 % confidence interval of the mean (Student's t)
    trials: tuple[int, ...] = ()  # the numbers of the trials that are done


def metric_of(records: Sequence[Record], requested: str | None) -> str:
    """Return the name of the metric to show: the requested metric, or the first of the trials.

    Raises:
        WrongUse: the trials do not have the requested metric.
    """
    names = list(dict.fromkeys(name for record in records for name in record.metrics))
    wanted = split_metric(requested, "--metric")[1] if requested else (names or ["metric"])[0]
    if names and wanted not in names:
        raise WrongUse(
            f"--metric {requested}: the trials have no metric {wanted}: use one of "
            f"{', '.join(names)}"
        )
    return wanted


def rows(records: Sequence[Record], metric: str) -> list[CombinationRow]:
    """Return one row per combination, in the order of the first trials."""
    groups: dict[tuple[tuple[str, Value], ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record.point.items()), []).append(record)
    return [_row(dict(point), group, metric) for point, group in groups.items()]


def _row(point: dict[str, Value], group: Sequence[Record], metric: str) -> CombinationRow:
    counts = {
        state: sum(record.state == state for record in group)
        for state in ("done", "failed", "pruned", "running", "pending")
    }
    found = [
        record.metrics[metric]
        for record in group
        if record.state == "done" and metric in record.metrics
    ]
    values = [value for value in found if math.isfinite(value)]
    counts["not finite"] = len(found) - len(values)
    mean = statistics.fmean(values) if values else math.nan
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    half = math.nan
    if len(values) > 1:
        half = student_t(len(values) - 1) * deviation / math.sqrt(len(values))
    low, high = _range(metric, values)
    done = tuple(record.number for record in group if record.state == "done")
    return CombinationRow(
        point, counts, mean, deviation, (max(low, mean - half), min(high, mean + half)), done
    )


def student_t(freedom: int) -> float:
    """Return the t with P(|T| <= t) = 0.95 for Student's t with `freedom` degrees of freedom.

    The bisection is over the angle atan(t / sqrt(freedom)). scipy.stats gives the same number, but
    its import takes most of a second.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(53):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(middle, freedom) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _probability(angle: float, freedom: int) -> float:
    """Return P(|T| <= sqrt(freedom) * tan(angle)).

    The sums are 26.7.3 and 26.7.4 of Abramowitz and Stegun (1964).
    """
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k - 1) / k
    inner = math.sin(angle) * total
    return 2 / math.pi * (angle + inner) if odd else inner


def _range(metric: str, values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the metric's mean: 0 to 1 for a share, and else unlimited.

    The name marks a share, unless a value is outside 0 to 1, as in per cent. Cutting an interval to
    this range does not change how often it covers the mean.
    """
    named = bool(_SHARES & set(metric.lower().split("_")))
    return (
        (0.0, 1.0) if named and all(0 <= value <= 1 for value in values) else (-math.inf, math.inf)
    )


def best_first(
    combinations: Sequence[CombinationRow], metric: str, requested: str | None
) -> list[CombinationRow]:
    """Return the rows sorted by the metric's mean: best first, rows without a value last."""
    sign = 1 if split_metric(requested or metric, "--metric")[0] == "min" else -1
    return sorted(combinations, key=lambda row: (math.isnan(row.mean), sign * row.mean))


def best_line(
    combinations: Sequence[CombinationRow],
    metric: str,
    requested: str | None,
    again: Callable[[int], str],
) -> str:
    """Return the best combination and the command `again` that repeats its first trial.

    The text is empty if no row has a value.
    """
    rows = best_first(combinations, metric, requested)
    if not rows or math.isnan(rows[0].mean):
        return ""
    best, direction = rows[0], split_metric(requested or metric, "--metric")[0]
    point = " ".join(f"{name}={value}" for name, value in best.point.items())
    of = f"mean of {len(best.trials)}" if len(best.trials) > 1 else f"trial {best.trials[0]}"
    which = {"min": "lowest", "max": "highest"}[direction]
    return (
        f"best:      {point}{', ' if point else ''}{which} {metric} {_figure(best.mean)} "
        f"({of})\nagain:     {again(best.trials[0])}"
    )


def energy_line(records: Sequence[Record]) -> str:
    """Return the mean energy of the trials that are done; empty if none was measured."""
    done = [record.metrics.get("energy_kwh") for record in records if record.state == "done"]
    measured = [kwh for kwh in done if kwh is not None]
    if not measured:
        return ""
    if len(measured) < len(done):
        return f"energy:    not measured for {len(done) - len(measured)} of {len(done)} trials"
    return f"energy:    {statistics.fmean(measured):.4g} kWh a trial (mean of {len(measured)})"


def table(combinations: Sequence[CombinationRow], metric: str) -> str:
    """Return the rows as aligned plain text."""
    names = list(dict.fromkeys(name for row in combinations for name in row.point))
    states = [
        state
        for state in ("not finite", "failed", "pruned", "running", "pending")
        if any(row.counts[state] for row in combinations)
    ]
    # A combination with one trial has no deviation. A sampler draws such combinations.
    spread = (
        ["sd", "95 % interval"]
        if any(not math.isnan(row.deviation) for row in combinations)
        else []
    )
    heading = [*names, "done", *states, metric, *spread]
    lines = [heading]
    for row in combinations:
        figures = [_figure(row.mean), *[_figure(row.deviation), _interval(row)][: len(spread)]]
        lines.append(
            [
                *(str(row.point.get(name, "")) for name in names),
                *(str(row.counts[s]) for s in ("done", *states)),
                *figures,
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(heading))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )


def as_csv(records: Sequence[Record]) -> str:
    """Return CSV with one line per trial and all its metrics."""
    names = list(dict.fromkeys(name for record in records for name in record.point))
    metrics = list(dict.fromkeys(name for record in records for name in record.metrics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", *names, "seed", *metrics, "seconds", "message"])
    for r in records:
        own = [
            *(r.point.get(name, "") for name in names),
            r.seed,
            *(r.metrics.get(name, "") for name in metrics),
        ]
        writer.writerow(
            [r.number, r.state, *own, "" if r.seconds is None else f"{r.seconds:.3f}", r.message]
        )
    return text.getvalue()


def write_csv(folder: Path, records: Sequence[Record]) -> None:
    """Replace results.csv atomically."""
    part = folder / f".results-{os.getpid()}.part"
    part.write_text(as_csv(records), encoding="utf-8", errors="backslashreplace")
    part.replace(folder / "results.csv")


def figure(
    combinations: Sequence[CombinationRow], records: Sequence[Record], metric: str, drawn: bool
) -> "Figure":
    """Draw the means and intervals over a grid's first setting, one line per choice of the others.

    If a sampler has `drawn` the settings, draw the metric over each setting instead.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in combinations for name in row.point))
    if drawn:
        return _scatter(records, names, metric)
    picture = Figure(figsize=(7, 4.2), dpi=110, layout="constrained")
    axes = picture.add_subplot()
    first, others = names[0] if names else None, names[1:]
    # Collect the points of each line.
    lines: dict[str, list[tuple[Value, CombinationRow]]] = {}
    for row in combinations:
        if not math.isnan(row.mean):
            label = _plain(", ".join(f"{name} {row.point.get(name)}" for name in others))
            lines.setdefault(label, []).append((row.point[first] if first else "all", row))
    numeric = all(as_number(x) is not None for line in lines.values() for x, _ in line)
    # Draw each line with its error bars.
    for label, line in lines.items():
        x: list[Any] = [as_number(value) if numeric else _plain(value) for value, _ in line]
        spread = [
            (0.0, 0.0)
            if math.isnan(r.deviation)
            else (r.mean - r.interval[0], r.interval[1] - r.mean)
            for _, r in line
        ]
        bars = list(zip(*spread, strict=True))  # down, up
        axes.errorbar(
            x, [row.mean for _, row in line], bars, marker="o", capsize=3, label=label or None
        )
    if len(lines) > 1:
        axes.legend(frameon=False)
    axes.set_xlabel(_plain(first or ""))
    axes.set_ylabel(f"{_plain(metric)}, mean and 95 % interval")
    axes.grid(alpha=0.3)
    return picture


def _plain(value: object) -> str:
    """Return the text of a value for matplotlib, which would read `$...$` as a formula."""
    return str(value).encode(errors="backslashreplace").decode().replace("$", r"\$")


def as_number(value: Value) -> float | None:
    """Return a setting as a number, or None. The values of a script are numbers in text."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _scatter(records: Sequence[Record], names: Sequence[str], metric: str) -> "Figure":
    from matplotlib.figure import Figure

    done = [record for record in records if record.state == "done"]
    picture = Figure(figsize=(3.6 * max(1, len(names)), 3.6), dpi=110, layout="constrained")
    for index, name in enumerate(names):
        axes = picture.add_subplot(1, len(names), index + 1)
        x: list[Any] = [record.point[name] for record in done]
        numeric = all(as_number(value) is not None for value in x)
        x = [as_number(value) if numeric else _plain(value) for value in x]
        axes.scatter(
            x, [record.metrics[metric] for record in done], c=[r.number for r in done], s=18
        )
        if x and all(isinstance(v, float) and v > 0 for v in x) and max(x) > 100 * min(x):
            axes.set_xscale("log")
        axes.set_xlabel(_plain(name))
        axes.set_ylabel(f"{_plain(metric)} (later trials lighter)" if index == 0 else "")
        axes.grid(alpha=0.3)
    return picture


def _figure(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _interval(row: CombinationRow) -> str:
    return "-" if math.isnan(row.deviation) else f"{row.interval[0]:.4g} to {row.interval[1]:.4g}"
