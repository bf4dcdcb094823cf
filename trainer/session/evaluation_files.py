"""Write the results of an evaluation."""

import errno
import json
import os
from collections.abc import Mapping, Sequence
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


def check_predictions(path: Path, job: Inference) -> None:
    """Make the folder of the predictions, and check before the evaluation that they can be written.

    Raises:
        WrongUse: The dataset's ids are not one for each example.
        StorageFailure: The file cannot be written.
    """
    ids = _ids(job)
    if len(ids) != job.evaluation.size:
        raise WrongUse(
            f"task {type(job.task).__name__}: the dataset has {job.evaluation.size} examples but "
            f"{len(ids)} ids: make `ids` a sequence with one name for each example"
        )
    if not job.world.is_first:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _predictions_not_writable(path, error) from error


def save_predictions(path: Path, job: Inference, values: Mapping[str, Tensor] | None) -> None:
    """Write the predictions of all examples.

    Raises:
        WrongUse: They are too many.
        StorageFailure: The file cannot be written.
    """
    if values is None:
        raise WrongUse(
            f"task {type(job.task).__name__}: predictions() returns more than {MOST_NUMBERS:,} "
            "numbers for all examples: return fewer columns"
        )
    names = job.task.class_names if isinstance(job.task, Classification) else ()
    try:
        write_predictions(path, _ids(job), values, names)
    except OSError as error:
        raise _predictions_not_writable(path, error) from error


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


def _ids(job: Inference) -> Sequence[object]:
    ids: Sequence[object] = getattr(job.evaluation.dataset, "ids", range(job.evaluation.size))
    return ids


def _predictions_not_writable(path: Path, error: OSError) -> StorageFailure:
    return StorageFailure(
        f"{path} cannot be written ({error.strerror or error}): set another file with "
        "--predictions FILE"
    )


def _not_writable(out: Path, error: OSError) -> StorageFailure:
    return StorageFailure(
        f"{out} cannot be written ({error.strerror or error}): set another folder with --out FOLDER"
    )
