"""Write the predictions of an evaluation as CSV, one row for each example."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trainbox.files import replacing


def write_predictions(
    path: Path,
    ids: Sequence[object],
    values: Mapping[str, Tensor],
    class_names: Sequence[str] = (),
) -> None:
    """Write a column for the ids and the columns of `values`, which are (N,) or (N, K).

    With K `class_names`, the columns of a (N, K) value have these names, and `truth` and
    `prediction` are names of classes.

    Raises:
        OSError: the file cannot be written.
    """
    columns: dict[str, Sequence[object]] = {"id": ids}
    for name, value in values.items():
        if value.ndim == 1:
            numbers = value.tolist()
            is_class = name in ("truth", "prediction") and class_names
            columns[name] = [
                class_names[number] if is_class else _text(number) for number in numbers
            ]
            continue
        parts = value.flatten(1).T
        named = class_names if len(class_names) == len(parts) else range(len(parts))
        for label, part in zip(named, parts, strict=True):
            columns[f"{name}_{label}"] = [_text(number) for number in part.tolist()]
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows(zip(*columns.values(), strict=True))
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def _text(number: float) -> str:
    """Return a whole number as it is, and a float with the 9 digits that identify a float32."""
    return f"{number:.9g}" if isinstance(number, float) else str(number)
