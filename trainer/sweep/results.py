"""The results of a sweep: a table of its combinations, and CSV of its trials.

Pure, except for `write_csv`.
"""

import math
import re
import statistics
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainbox.errors import WrongUse
from trainbox.files.entries import csv_text
from trainbox.options.config import split_metric
from trainer.sweep.grid import NO_METRIC, Record, Value

# A metric with one of these names in its own name is a share, with values from 0 to 1.
_SHARE = re.compile(
    r"(?:^|_)(?:accuracy|f1|precision|recall|auc|auroc|iou|dice|sensitivity|specificity)(?:_|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class CombinationRow:
    """A combination: its trials counted by state, and a metric of the trials that are done."""

    point: dict[str, Value]
    counts: dict[str, int]
    mean: float
    deviation: float
    interval: tuple[float, float]  # 95 % confidence interval of the mean (Student's t)
    trials: tuple[int, ...] = ()  # the numbers of the trials of the mean, else of the done ones


def goal_of(records: Sequence[Record], requested: str | None) -> tuple[str, str] | None:
    """Return (`min` or `max`, name) of the metric to show: the requested one, or the first.

    Return None without any metric.

    Raises:
        WrongUse: the trials do not have the requested metric.
    """
    names = _names(record.metrics for record in records)
    if requested == NO_METRIC or not (requested or names):
        return None
    direction, wanted = split_metric(requested or names[0], "--metric")
    if names and wanted not in names:
        raise WrongUse(
            f"--metric {requested}: the trials have no metric {wanted}: use one of "
            f"{', '.join(names)}"
        )
    return direction, wanted


def _names(mappings: Iterable[Iterable[str]]) -> list[str]:
    """Return all keys of the mappings in the order in which they appear."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def rows(records: Sequence[Record], metric: str | None) -> list[CombinationRow]:
    """Return one row per combination, in the order of the first trials."""
    groups: dict[tuple[tuple[str, Value], ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record.point.items()), []).append(record)
    return [_row(dict(point), group, metric) for point, group in groups.items()]


def _row(point: dict[str, Value], group: Sequence[Record], metric: str | None) -> CombinationRow:
    counts = Counter(record.state for record in group)
    done = [record for record in group if record.state == "done"]
    found = [record for record in done if metric in record.metrics]
    finite = [record for record in found if math.isfinite(record.metrics[metric or ""])]
    values = [record.metrics[metric or ""] for record in finite]
    counts["not finite"] = len(found) - len(finite)
    mean = statistics.fmean(values) if values else math.nan
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    half = math.nan
    if len(values) > 1:
        from scipy.special import stdtrit  # takes 0.2 s; scipy.stats would take a second

        half = float(stdtrit(len(values) - 1, 0.975)) * deviation / math.sqrt(len(values))
    low, high = _range(metric or "", values)
    interval = max(low, mean - half), min(high, mean + half)
    numbers = tuple(record.number for record in finite or done)
    return CombinationRow(point, counts, mean, deviation, interval, numbers)


def _range(metric: str, values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the metric's mean: 0 to 1 for a share, and else unlimited.

    The name marks a share, unless a value is outside 0 to 1, as in per cent. Cutting an interval to
    this range does not change how often it covers the mean.
    """
    is_share = _SHARE.search(metric) and all(0 <= value <= 1 for value in values)
    return (0.0, 1.0) if is_share else (-math.inf, math.inf)


def best_first(
    combinations: Sequence[CombinationRow], goal: tuple[str, str] | None
) -> list[CombinationRow]:
    """Return the rows sorted by the metric's mean: best first, rows without a value last."""
    sign = 1 if goal and goal[0] == "min" else -1
    return sorted(combinations, key=lambda row: (math.isnan(row.mean), sign * row.mean))


def best_line(
    combinations: Sequence[CombinationRow],
    goal: tuple[str, str] | None,
    again: Callable[[int], str],
) -> str:
    """Return the best combination and the command `again` that repeats its first trial.

    The text is empty if no row has a value.
    """
    best = next(iter(best_first(combinations, goal)), None)
    if best is None or goal is None or math.isnan(best.mean):
        return ""
    point = " ".join(f"{name}={value}" for name, value in best.point.items())
    of = f"mean of {len(best.trials)}" if len(best.trials) > 1 else f"trial {best.trials[0]}"
    which = {"min": "lowest", "max": "highest"}[goal[0]]
    return (
        f"best:      {point}{', ' if point else ''}{which} {goal[1]} {shown(best.mean)} "
        f"({of})\nagain:     {again(best.trials[0])}"
    )


def same_line(records: Sequence[Record]) -> str:
    """Return a line about swept settings whose values have changed no trial; else an empty one."""
    done = [record for record in records if record.state == "done"]
    names = _names(record.point for record in done)
    if len({str(record.point) for record in done}) > 1 and _change_nothing(names, done):
        unused = names
    else:
        unused = [name for name in names if _change_nothing([name], done)]
    if not unused:
        return ""
    return (
        f"same:      all values of {', '.join(unused)} gave the same metrics: check that the task "
        "uses them"
    )


def changed_line(sources: Mapping[int, Mapping[str, str]]) -> str:
    """Return a line about files that have changed between the trials; else an empty one.

    `sources` has the digests of the files of each trial, by the number of the trial. A trial may
    import files that others do not need, so only files of several trials are compared.
    """
    first: dict[str, tuple[int, str]] = {}
    changed: dict[str, tuple[int, int]] = {}
    for number, digests in sorted(sources.items()):
        for name, digest in digests.items():
            before, known = first.setdefault(name, (number, digest))
            if digest != known:
                changed.setdefault(name, (before, number))
    if not changed:
        return ""
    one, other = next(iter(changed.values()))
    return (
        f"changed:   {', '.join(changed)} differs between trials such as {one} and {other}: check "
        "whether their results compare, or train all again with another --name"
    )


def _change_nothing(names: Sequence[str], done: Sequence[Record]) -> bool:
    """Return whether trials that differ only in these settings have the same metrics."""
    alike: dict[str, list[dict[str, float]]] = {}
    for record in done:
        others = {name: value for name, value in record.point.items() if name not in names}
        metrics = {n: v for n, v in record.metrics.items() if n != "samples_per_second"}
        alike.setdefault(f"{record.seed} {others}", []).append(metrics)
    compared = [group for group in alike.values() if len(group) > 1]
    return bool(compared) and all(m == group[0] for group in compared for m in group)


def cells(combinations: Sequence[CombinationRow], metric: str | None) -> list[list[str]]:
    """Return the heading and the rows of the table of results."""
    names = _names(row.point for row in combinations)
    states = [
        state
        for state in ("not finite", "failed", "pruned", "running", "pending")
        if any(row.counts[state] for row in combinations)
    ]
    # A combination with one trial has no deviation. A sampler draws such combinations.
    has_spread = any(not math.isnan(row.deviation) for row in combinations)
    spread = ["sd", "95 % interval"] if has_spread else []
    figures = [metric, *spread] if metric is not None else []
    lines = [[*names, "done", *states, *figures]]
    for row in combinations:
        point = [str(row.point.get(name, "")) for name in names]
        counts = [str(row.counts[state]) for state in ("done", *states)]
        low, high = row.interval
        interval = "-" if math.isnan(row.deviation) else f"{low:.4g} to {high:.4g}"
        found = [shown(row.mean), shown(row.deviation), interval][: len(figures)]
        lines.append([*point, *counts, *found])
    return lines


def table(combinations: Sequence[CombinationRow], metric: str | None) -> str:
    """Return the table of results as aligned plain text."""
    lines = cells(combinations, metric)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )


def trial_lines(records: Sequence[Record]) -> list[list[object]]:
    """Return a heading and a line per trial with all its metrics."""
    names = _names(record.point for record in records)
    metrics = _names(record.metrics for record in records)
    lines: list[list[object]] = [["trial", "state", *names, "seed", *metrics, "seconds", "message"]]
    for r in records:
        point = [r.point.get(name, "") for name in names]
        figures = [r.metrics.get(name, "") for name in metrics]
        seconds = "" if r.seconds is None else f"{r.seconds:.3f}"
        lines.append([r.number, r.state, *point, r.seed, *figures, seconds, r.message])
    return lines


def as_csv(records: Sequence[Record]) -> str:
    """Return CSV with one line per trial and all its metrics."""
    return csv_text(trial_lines(records))


def write_csv(folder: Path, records: Sequence[Record]) -> None:
    """Replace results.csv atomically. Several processes of a sweep may do so at once."""
    part = folder / f".results-{uuid.uuid4().hex}.part"
    part.write_text(as_csv(records), encoding="utf-8", errors="backslashreplace")
    part.replace(folder / "results.csv")


def shown(value: float) -> str:
    """Return a number with four digits, or a dash for a missing one."""
    return "-" if math.isnan(value) else f"{value:.4g}"
