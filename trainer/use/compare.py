"""Compare stored trainings: their settings, data, software and results, and their curves."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainbox.disclosure.recorded_values import flat
from trainbox.errors import WrongUse
from trainbox.folders.record_folder import METRICS
from trainer.records.compare_runs import manifest_differences
from trainer.records.curves import Curves, draw_curves
from trainer.records.jsonl import damaged_line
from trainer.records.run_record import RunRecord

_MOST_CHARS = 24  # of a cell
# The parts of a comparison, and how the names of their manifest entries begin. All others are
# software.
_PARTS = {
    "settings": ("settings.",),
    "data": ("data.", "classes"),
    "sources": ("sources.", "build."),
    "hardware": ("device.", "machine.", "threads", "plan."),
}


def compare(paths: Sequence[Path], figure: Path) -> str:
    """Return a table of what differs between runs, and draw their curves to the file `figure`.

    Raises:
        WrongUse: There are fewer than two runs, or a folder is no training.
        StorageFailure: The figure cannot be written.
    """
    if len({path.resolve() for path in paths}) < 2:
        raise WrongUse("compare needs two different runs: give their folders")
    records = [RunRecord.open(path) for path in paths]
    curves = [Curves.read(record.path, record.config.best_by or "") for record in records]
    rows = [["", *(path.name for path in paths)], *_differences(records), *_metrics(curves)]
    draw_curves(curves, figure)
    damaged = [damage for path in paths if (damage := damaged_line(path / METRICS))]
    notes = [f"curves     {damage}: restore the file" for damage in damaged]
    return "\n".join([*_aligned(rows), f"curves     {figure}", *notes])


def _differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return a row for each entry of the manifests that differs, below the name of its part."""
    first, *others = (run.manifest for run in runs)
    names = dict.fromkeys(name for other in others for name in manifest_differences(first, other))
    values = [flat(run.manifest) for run in runs]
    parts: dict[str, list[list[str]]] = {part: [] for part in (*_PARTS, "software")}
    for name in names:
        part = next((p for p, begins in _PARTS.items() if name.startswith(begins)), "software")
        shown = name.removeprefix("settings.").removeprefix("fields.")
        parts[part].append([f"  {shown}", *(_cell(each.get(name)) for each in values)])
    return [row for part, rows in parts.items() for row in _titled(part, rows)]


def _metrics(runs: Sequence[Curves]) -> list[list[str]]:
    """Return a row for each metric of the best validations."""
    best = [run.best() for run in runs]
    names = dict.fromkeys(name for each in best for name in each if name != "epoch")
    rows = [
        [f"  {name}", *(f"{each[name]:.4g}" if name in each else "-" for each in best)]
        for name in names
    ]
    return _titled("best validation", rows)


def _titled(title: str, rows: Sequence[list[str]]) -> list[list[str]]:
    return [[title], *rows] if rows else [[title, "the same"]]


def _cell(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    table = [list(row) for row in rows]
    columns = max(map(len, table))
    widths = [
        max((len(row[column]) for row in table if column < len(row)), default=0)
        for column in range(columns)
    ]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in table
    ]
