"""Format predictions as CSV or as JSON lines, one row for each example."""

import csv
import io
import json
from collections.abc import Mapping, Sequence

from torch import Tensor

from trainer.classification import Classification
from trainer.records.run_folder import finite_or_null
from trainer.task import Task

Columns = Mapping[str, Sequence[int | float | str]]


def prediction_columns(task: Task, values: Mapping[str, Tensor]) -> Columns:
    """Return the columns of `values`, which are (N,) or (N, K).

    For a Classification of K classes, the columns of a (N, K) value have the names of the classes,
    and `truth` and `prediction` are names of classes.
    """
    class_names = task.class_names if isinstance(task, Classification) else ()
    columns: dict[str, Sequence[int | float | str]] = {}
    for name, value in values.items():
        if value.ndim == 1:
            is_class = name in ("truth", "prediction") and class_names
            numbers = value.tolist()
            columns[name] = [class_names[k] for k in numbers] if is_class else numbers
            continue
        parts = value.flatten(1).T
        named = class_names if len(class_names) == len(parts) else range(len(parts))
        for label, part in zip(named, parts, strict=True):
            columns[f"{name}_{label}"] = part.tolist()
    return columns


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
