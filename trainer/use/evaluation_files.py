"""Write the results of an evaluation."""

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainbox.contract.errors import StorageFailure
from trainbox.contract.files import replacing
from trainbox.pictures import write_png
from trainer.loop.state import Inference
from trainer.use.per_example import example_ids, not_too_many
from trainer.use.predictions import csv_rows, prediction_columns


def check_predictions(path: Path, job: Inference) -> None:
    """Make the folder of the predictions, and check before the evaluation that they can be written.

    Raises:
        WrongUse: The dataset's ids are not one for each example.
        StorageFailure: The file cannot be written.
    """
    example_ids(job)
    if not job.world.is_first:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The new file replaces the path, which would remove a link or a device such as /dev/stdout.
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.ENXIO, "not a regular file")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _predictions_not_writable(path, error) from error


def save_predictions(path: Path, job: Inference, values: dict[str, Tensor] | None) -> None:
    """Write the predictions of all examples.

    Raises:
        WrongUse: They are too many, or two columns have the same name.
        StorageFailure: The file cannot be written.
    """
    values = not_too_many(job.task, values)
    columns = prediction_columns(job.task, "id", example_ids(job), values)
    try:
        with replacing(path) as file:
            # An id may be the path of a file, which may have any bytes.
            file.write(csv_rows(columns).encode(errors="backslashreplace"))
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


def _predictions_not_writable(path: Path, error: OSError) -> StorageFailure:
    return StorageFailure(
        f"{path} cannot be written ({error.strerror or error}): set another file with "
        "--predictions FILE"
    )


def _not_writable(out: Path, error: OSError) -> StorageFailure:
    return StorageFailure(
        f"{out} cannot be written ({error.strerror or error}): set another folder with --out FOLDER"
    )
