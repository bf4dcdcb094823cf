"""Compare the figures of an evaluation with those that the training recorded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.loop.evaluate import Evaluation
from trainer.loop.task_checks import KEYS_OF_ENTRIES
from trainer.run.compare import (
    changes_bits,
    differing_names,
    listed_changes,
)
from trainer.run.run_folder import finite_or_null
from trainer.run.run_record import RunRecord

VALIDATION, TEST = "validation", "test"


@dataclass(frozen=True)
class FigureComparison:
    """Whether the figures are those of the training; `equal` is None if nothing is compared.

    `unexplained` is true if they differ although nothing that may change bits has changed.
    """

    equal: bool | None
    line: str
    unexplained: bool = False


def recorded_figures(result: Evaluation) -> dict[str, Any]:
    """Return the metrics and the tables of statistics, as an entry of metrics.jsonl has them."""
    return finite_or_null(result.figures)


def compare_figures(
    stored: RunRecord, figures: Mapping[str, Any], step: int, part: str, changed: Mapping[str, Any]
) -> FigureComparison:
    """Compare `figures` with those that the training recorded for `step`.

    `part` names the evaluated data. `changed` has the manifest entries that differ now.
    """
    if part != VALIDATION:
        return FigureComparison(None, f"not compared: the training did not read the {part} data")
    if f"data.{VALIDATION}" in changed:
        return FigureComparison(
            None, "not compared: the validation data differ from the training's"
        )
    before = figures_of_training(stored, step)
    if before is None:
        return FigureComparison(
            None, f"not compared: metrics.jsonl has no validation at step {step}"
        )
    names = differing_names(before, figures)
    if not names:
        return FigureComparison(True, f"equal to those of training at step {step}")
    line = (
        f"different from those of training at step {step}: {names[0]} is "
        f"{_shown(figures, names[0])} instead of {_shown(before, names[0])}"
    )
    reason = _reason(stored, changed)
    return FigureComparison(
        False, f"{line}; {reason}" if reason else line, unexplained=reason is None
    )


def figures_of_training(stored: RunRecord, step: int) -> dict[str, Any] | None:
    """Return the figures of the validation at `step` in metrics.jsonl, or None."""
    entry = stored.validation_at(step)
    return entry and {name: x for name, x in entry.items() if name not in KEYS_OF_ENTRIES}


def _reason(stored: RunRecord, changed: Mapping[str, Any]) -> str | None:
    """Return why the bits may differ, or None."""
    if not stored.config.deterministic:
        return "the run has --fast"
    reasons = {
        name: values
        for name, values in changed.items()
        if changes_bits(name) or name.startswith("plan.")
    }
    return f"changed: {listed_changes(reasons)}" if reasons else None


def _shown(figures: Mapping[str, Any], name: str) -> str:
    if name not in figures:
        return "missing"
    value = figures[name]
    if value is None:
        return "not finite"
    return "a table" if isinstance(value, list) else str(value)
