"""Draw the curves of trainings from their own log entries, without torch."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainbox.errors import WrongUse
from trainbox.folders.record_folder import METRICS
from trainbox.folders.write_failures import writing
from trainbox.options.config import split_metric
from trainer.records.jsonl import read_entries


@dataclass(frozen=True)
class Curves:
    """The entries of a run's metrics.jsonl, and the metric that selects its best checkpoint."""

    name: str
    entries: Sequence[Mapping[str, Any]]
    direction: str
    metric: str

    @classmethod
    def read(cls, run: Path, best_by: str) -> "Curves":
        return cls(run.name, read_entries(run / METRICS), *split_metric(best_by, "--best-by"))

    def of(self, kind: str, name: str) -> tuple[list[int], list[float]]:
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


def draw_curves(runs: Sequence[Curves], file: Path) -> None:
    """Draw the loss of the training and the metric of the best checkpoint, a line for each run.

    Raises:
        StorageFailure: The file cannot be written.
        WrongUse: matplotlib does not know the format of the file.
    """
    # The import takes a third of a second.
    from matplotlib.figure import Figure

    panels = [("train", "loss"), *dict.fromkeys(("validation", run.metric) for run in runs)]
    picture = Figure(figsize=(0.6 + 4.4 * len(panels), 3.6), layout="constrained")
    for axes, (kind, name) in zip(
        picture.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for run in runs:
            steps, values = run.of(kind, name)
            label = run.name.replace("$", r"\$")  # matplotlib would read a formula
            axes.plot(steps, values, marker="" if len(steps) > 50 else ".", label=label)
        axes.set_title("loss of the training" if kind == "train" else f"{name} of the validation")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend(fontsize="small")
    with warnings.catch_warnings(), writing(file, "give another file with --figure"):
        warnings.simplefilter("ignore")  # a name can have a character that the font lacks
        try:
            picture.savefig(file)
        except ValueError as error:
            raise WrongUse(f"--figure {file}: {error}") from error
