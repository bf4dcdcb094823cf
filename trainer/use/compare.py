"""Compare stored trainings: their settings, data, software and results, and their curves."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainbox.errors import WrongUse
from trainbox.folders.record_folder import METRICS
from trainbox.folders.write_failures import writing
from trainbox.options.config import split_metric
from trainer.records.compare_runs import flat, manifest_differences
from trainer.records.jsonl import read_entries
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


@dataclass(frozen=True)
class _Stored:
    """A run, its entries of metrics.jsonl, and the metric that selects its best checkpoint."""

    record: RunRecord
    entries: Sequence[Mapping[str, Any]]
    direction: str
    metric: str

    @classmethod
    def read(cls, path: Path) -> "_Stored":
        record = RunRecord.open(path)
        direction, metric = split_metric(record.config.best_by or "", "--best-by")
        return cls(record, read_entries(path / METRICS), direction, metric)

    def curve(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """Return the steps and the values of a figure in the entries of a kind."""
        points = [
            (e["step"], e[name]) for e in self.entries if e["kind"] == kind and _is_in(e, name)
        ]
        return [step for step, _ in points], [value for _, value in points]

    def best(self) -> Mapping[str, float]:
        """Return the metrics of the best validation."""
        sign = 1 if self.direction == "min" else -1
        validations = [
            e for e in self.entries if e["kind"] == "validation" and _is_in(e, self.metric)
        ]
        if not validations:
            return {}
        best = min(validations, key=lambda entry: sign * entry[self.metric])
        return {name: value for name, value in best.items() if _is_in(best, name)}


def _is_in(entry: Mapping[str, Any], name: str) -> bool:
    value = entry.get(name)
    return isinstance(value, int | float) and math.isfinite(value) and name != "time_unix_s"


def compare(paths: Sequence[Path], figure: Path) -> str:
    """Return a table of what differs between runs, and draw their curves to the file `figure`.

    Raises:
        WrongUse: There are fewer than two runs, or a folder is no training.
        StorageFailure: The figure cannot be written.
    """
    if len({path.resolve() for path in paths}) < 2:
        raise WrongUse("compare needs two different runs: give their folders")
    runs = [_Stored.read(path) for path in paths]
    rows = [["", *(path.name for path in paths)], *_differences(runs), *_metrics(runs)]
    _draw(runs, figure)
    return "\n".join([*_aligned(rows), f"curves     {figure}"])


def _differences(runs: Sequence[_Stored]) -> list[list[str]]:
    """Return a row for each entry of the manifests that differs, below the name of its part."""
    first, *others = (run.record.manifest for run in runs)
    names = dict.fromkeys(name for other in others for name in manifest_differences(first, other))
    values = [flat(run.record.manifest) for run in runs]
    parts: dict[str, list[list[str]]] = {part: [] for part in (*_PARTS, "software")}
    for name in names:
        part = next((p for p, begins in _PARTS.items() if name.startswith(begins)), "software")
        shown = name.removeprefix("settings.").removeprefix("fields.")
        parts[part].append([f"  {shown}", *(_cell(each.get(name)) for each in values)])
    return [row for part, rows in parts.items() for row in _titled(part, rows)]


def _metrics(runs: Sequence[_Stored]) -> list[list[str]]:
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


def _draw(runs: Sequence[_Stored], file: Path) -> None:
    """Draw the loss of the training and the metric of the best checkpoint, a line for each run."""
    from matplotlib.figure import Figure

    panels = [("train", "loss"), *dict.fromkeys(("validation", run.metric) for run in runs)]
    picture = Figure(figsize=(0.6 + 4.4 * len(panels), 3.6), layout="constrained")
    for axes, (kind, name) in zip(
        picture.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for run in runs:
            steps, values = run.curve(kind, name)
            axes.plot(steps, values, marker="" if len(steps) > 50 else ".", label=_plain(run))
        axes.set_title("loss of the training" if kind == "train" else f"{name} of the validation")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with warnings.catch_warnings(), writing(file, "give another file with --figure"):
        warnings.simplefilter("ignore")  # a name can have a character that the font lacks
        try:
            picture.savefig(file)
        except ValueError as error:
            raise WrongUse(f"--figure {file}: {error}") from error


def _plain(run: _Stored) -> str:
    return run.record.path.name.replace("$", r"\$")  # matplotlib would read a formula
