"""The table of `trainbox runs`. Pure."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from entrypoint.runs.read import StoredRun
from trainbox.processes.streams import printable

_MOST_SETTINGS = 6  # columns of settings
_MOST_CHARS = 40  # of a cell
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))

# The names of --sort, and what they sort by.
SORTS: dict[str, Callable[[StoredRun], Any]] = {
    "name": lambda run: run.name,
    "age": lambda run: -run.changed_unix_s,
    "metric": lambda run: run.rank,
    "size": lambda run: -run.bytes,
    "state": lambda run: run.state,
}


def differing(runs: Sequence[StoredRun]) -> list[str]:
    """Return the names of the settings that differ between the runs of one task.

    The first ones are those in which the most runs differ from the most frequent value.
    """
    found = Counter[str]()
    tasks: dict[str, list[StoredRun]] = {}
    for run in runs:
        if run.settings:
            tasks.setdefault(run.task, []).append(run)
    for alike in tasks.values():
        for name in dict.fromkeys(name for run in alike for name in run.settings):
            raw = [run.settings.get(name) for run in alike]
            if raw.count(raw[0]) == len(raw):  # most settings, and the conversion takes time
                continue
            values = Counter(text_of_setting(run.settings, name) for run in alike)
            if len(values) > 1:
                found[name] += len(alike) - max(values.values())
    return [name for name, _ in found.most_common()]


def table(runs: Sequence[StoredRun], now_unix_s: float) -> str:
    """Return a row for each run, with only the settings that differ between the runs shown."""
    settings = differing(runs)
    shown = settings[:_MOST_SETTINGS]
    head = ["run", "task", *shown, "metric", "steps", "state", "age", "MB"]
    rows = [
        [
            run.name,
            run.task,
            *(text_of_setting(run.settings, name) for name in shown),
            _metric(run),
            f"{run.step:,}/{run.steps:,}" if run.steps is not None else f"{run.step:,}",
            f"{run.state}: {run.why}" if run.why else run.state,
            _age(now_unix_s - run.changed_unix_s) if run.changed_unix_s else "",
            f"{run.bytes / 1e6:,.1f}",
        ]
        for run in runs
    ]
    lines = aligned([head, *rows])
    if left := settings[_MOST_SETTINGS:]:
        lines.append(f"also different: {', '.join(left)}")
    return "\n".join(lines)


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, whose rows may be shorter than the first one.

    The first cell of a row is whole, because it may be copied to another command.
    """
    cells = [[printable(row[0]), *(_cut(printable(cell)) for cell in row[1:])] for row in rows]
    widths = [
        max(len(row[column]) for row in cells if column < len(row))
        for column in range(len(cells[0]))
    ]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in cells
    ]


def json_of(run: StoredRun) -> dict[str, Any]:
    """Return a run as an object of `--json`."""
    return {
        **{name: value for name, value in vars(run).items() if name != "rank"},
        "settings": dict(run.settings),
        "metric": {run.metric[0]: run.metric[1]} if run.metric else None,
    }


def _metric(run: StoredRun) -> str:
    """Return the best saved metric of a training, or the last metric of a script."""
    if run.metric is None:
        return ""
    return f"{'last' if run.is_script else 'best'} {run.metric[0]} {run.metric[1]:.4g}"


def text_of_setting(settings: Mapping[str, Any], name: str) -> str:
    """Return a setting as a cell, `-` if it was not given."""
    value = settings.get(name)
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."


def _age(seconds: float) -> str:
    for unit_s, name in _UNITS:
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return "0 s"
