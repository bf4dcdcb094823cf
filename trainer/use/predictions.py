"""Format predictions as CSV or as JSON lines, one row for each example."""

import csv
import io
import json
from collections.abc import Mapping, Sequence

from torch import Tensor

from trainbox.classification import Classification
from trainbox.contract.errors import WrongUse
from trainbox.task import Task
from trainer.run.run_folder import finite_or_null

Columns = Mapping[str, Sequence[int | float | str]]


def prediction_columns(
    task: Task, first: str, ids: Sequence[str], values: Mapping[str, Tensor]
) -> Columns:
    """Return the column `first` with the `ids`, and the columns of `values`: (N,) or (N, K).

    For a Classification of K classes, the columns of a (N, K) value have the names of the classes,
    and `truth` and `prediction` are names of classes.

    Raises:
        WrongUse: Two columns have the same name.
    """
    class_names = task.class_names if isinstance(task, Classification) else ()
    columns: dict[str, Sequence[int | float | str]] = {first: ids}
    for name, value in values.items():
        found = {name: value}
        if value.ndim == 2:
            parts = value.T
            named = class_names if len(class_names) == len(parts) else range(len(parts))
            found = {f"{name}_{label}": part for label, part in zip(named, parts, strict=True)}
        for label, part in found.items():
            if label in columns:
                raise WrongUse(
                    f"task {type(task).__name__}: predictions() gives two columns the name "
                    f"{label!r}: rename one of them"
                )
            is_class = name in ("truth", "prediction") and _are_classes(part, len(class_names))
            numbers = part.tolist()
            columns[label] = [class_names[k] for k in numbers] if is_class else numbers
    return columns


def _are_classes(value: Tensor, count: int) -> bool:
    """Return whether `value` (N,) has only indices of `count` classes."""
    if value.is_floating_point() or not count:
        return False
    return bool(((value >= 0) & (value < count)).all())


def csv_rows(columns: Columns) -> str:
    """Return a header and the rows of the columns as CSV."""
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows([_text(value) for value in row] for row in zip(*columns.values(), strict=True))
    return text.getvalue()


def json_lines(columns: Columns) -> str:
    """Return a JSON object for each row of the columns. NaN and infinity become null."""
    return "".join(
        json.dumps(finite_or_null(dict(zip(columns, map(_rounded, row), strict=True)))) + "\n"
        for row in zip(*columns.values(), strict=True)
    )


def _text(value: float | str) -> str:
    """Return a float with the 9 digits that identify a float32, and any other value as it is."""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _rounded(value: float | str) -> float | str:
    return float(_text(value)) if isinstance(value, float) else value
