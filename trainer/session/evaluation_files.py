"""Write the results of an evaluation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainbox.files import replacing
from trainer.classification import Classification
from trainer.errors import StorageFailure, WrongUse
from trainer.loop.per_example import MOST_NUMBERS
from trainer.loop.state import Inference
from trainer.pictures import write_png
from trainer.records.predictions import write_predictions


def save_predictions(path: Path, job: Inference, values: Mapping[str, Tensor] | None) -> None:
    """Write the predictions of all examples.

    Raises:
        WrongUse: They are too many, or the dataset's ids are not one for each example.
        StorageFailure: The file cannot be written.
    """
    if values is None:
        raise WrongUse(
            f"task {type(job.task).__name__}: predictions() returns more than {MOST_NUMBERS:,} "
            "numbers for all examples: return fewer columns"
        )
    ids = getattr(job.evaluation.dataset, "ids", range(job.evaluation.size))
    if len(ids) != job.evaluation.size:
        raise WrongUse(
            f"task {type(job.task).__name__}: the dataset has {job.evaluation.size} examples but "
            f"{len(ids)} ids: make `ids` a sequence with one name for each example"
        )
    names = job.task.class_names if isinstance(job.task, Classification) else ()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_predictions(path, ids, values, names)
    except OSError as error:
        raise StorageFailure(
            f"{path} cannot be written ({error.strerror or error}): set another file with "
            "--predictions FILE"
        ) from error


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(out, error) from error


def write_results(out: Path, entry: Mapping[str, Any], pictures: Mapping[str, Any]) -> None:
    """Write the pictures and then evaluation.json, which replaces that of an earlier call."""
    try:
        for name, picture in pictures.items():
            write_png(out / f"{name.replace('/', '-')}.png", picture)
        with replacing(out / "evaluation.json") as file:
            file.write(json.dumps(entry, indent=2).encode() + b"\n")
    except OSError as error:
        raise _not_writable(out, error) from error


def _not_writable(out: Path, error: OSError) -> StorageFailure:
    return StorageFailure(
        f"{out} cannot be written ({error.strerror or error}): set another folder with --out FOLDER"
    )
