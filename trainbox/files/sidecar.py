"""The files of checkpoints: `step-00000800.pt` and its sidecar `step-00000800.json`.

The sidecar has the SHA-256 of the other file and of its own fields. It appears last, so a
checkpoint with a sidecar is complete. The checkpoints of Trainbox's own trainings and of
`trainbox.Checkpoints` are such files.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from trainbox.files.regular_files import open_regular, read_object, replacing

_OWN_SHA256 = "fields_sha256"  # of the other fields of a sidecar
# This file appears once a run or a folder has completed a checkpoint.
FIRST_CHECKPOINT = "first_checkpoint.json"


def checkpoint_path(folder: Path, step: int, suffix: str = ".json") -> Path:
    return folder / f"step-{step:08d}{suffix}"


def steps_in(folder: Path, suffix: str = ".json") -> list[int]:
    """Return the steps that have a file with `suffix`, oldest first."""
    return steps_of(names_in(folder), suffix)


def names_in(folder: Path) -> frozenset[str]:
    """Return the names of what is in `folder`; none if it cannot be listed."""
    try:
        return frozenset(os.listdir(folder))  # noqa: PTH208 - many runs need their folders fast
    except OSError:
        return frozenset()


def steps_of(names: Iterable[str], suffix: str = ".json") -> list[int]:
    """Return the steps whose file with `suffix` is one of `names`, oldest first."""
    pattern = re.compile(r"step-([0-9]{8,})" + re.escape(suffix))
    found = ((name, int(match[1])) for name in names if (match := pattern.fullmatch(name)))
    # A name with more zeros is of another program.
    return sorted(step for name, step in found if name == f"step-{step:08d}{suffix}")


def sidecar_text(fields: Mapping[str, Any]) -> str:
    """Return the text of a sidecar with `fields` and their own SHA-256."""
    return json.dumps({**fields, _OWN_SHA256: _sha256(fields)}, indent=2) + "\n"


def read_sidecar(path: Path) -> dict[str, Any]:
    """Return the fields of the sidecar at `path`.

    Raises:
        OSError: the file is missing, unreadable or not a regular file.
        ValueError: the file is not a sidecar, or a field was changed.
    """
    fields = read_object(path)
    if (stated := fields.pop(_OWN_SHA256, None)) != _sha256(fields):
        raise ValueError("it was edited or damaged" if stated else "it is of another program")
    return fields


def sidecar_if_valid(path: Path) -> dict[str, Any] | None:
    """Return the fields of the sidecar at `path`, or None if it is missing, damaged or edited."""
    try:
        return read_sidecar(path)
    except (OSError, ValueError):
        return None


def _sha256(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def write_checkpoint(
    folder: Path,
    step: int,
    write: Callable[[IO[bytes]], None],
    fields: Mapping[str, Any],
    durable: bool = True,
) -> None:
    """Write what `write` writes as the checkpoint of `step`, and `fields` to its sidecar.

    The sidecar is on the disk under its temporary name before the checkpoint gets its name. If the
    process is killed between the two renames, `complete_or_remove` finishes the save. A checkpoint
    that is not `durable` may be lost if the machine fails.

    Raises:
        OSError: the files cannot be written. A checkpoint that `step` already had is unchanged.
    """
    with (
        replacing(checkpoint_path(folder, step), durable) as sidecar_file,
        replacing(checkpoint_path(folder, step, ".pt"), durable) as file,
    ):
        hashed = _HashedFile(file)
        try:
            write(hashed)  # type: ignore[arg-type]
        except RuntimeError as error:
            # torch hides the reason, such as a full disk
            raise (hashed.error or error) from error
        sidecar = {**fields, "sha256": hashed.sha256.hexdigest(), "bytes": hashed.size}
        sidecar["saved_at_unix_s"] = round(time.time(), 3)
        sidecar_file.write(sidecar_text(sidecar).encode())
        sidecar_file.flush()
        if durable:
            os.fsync(sidecar_file.fileno())


def damage(path: Path, sidecar: Mapping[str, Any]) -> str | None:
    """Return how the bytes of the checkpoint at `path` differ from `sidecar`, or None."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != sidecar.get("bytes"):  # check first: reading a huge file takes long
                return f"{size} bytes instead of {short(sidecar.get('bytes'))}"
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"its tensors cannot be read: {error.strerror or error}"
    if found != sidecar.get("sha256"):
        return f"sha256 {found[:12]}... instead of {short(sidecar.get('sha256'))}"
    return None


def complete_or_remove(folder: Path) -> list[Path]:
    """Clean up after a killed process, and return the foreign paths with a temporary name.

    A save that lacks only its last rename is finished. Temporary files are removed.
    """
    for sidecar in folder.glob("step-*.json.tmp"):
        path = sidecar.with_name(sidecar.name.removesuffix(".json.tmp") + ".pt")
        with contextlib.suppress(OSError, ValueError):
            if damage(path, read_sidecar(sidecar)) is None:
                sidecar.replace(sidecar.with_suffix(""))
    return remove_temporary(folder.glob("step-*.tmp"))


def remove_temporary(paths: Iterable[Path]) -> list[Path]:
    """Remove the regular files of `paths`, and return what exists and is something else."""
    foreign = []
    for path in paths:
        if path.is_file() and not path.is_symlink():
            path.unlink()
        elif os.path.lexists(path):
            foreign.append(path)
    return foreign


def remove_checkpoint(folder: Path, step: int) -> None:
    """Remove the checkpoint of `step`.

    If the process is killed in between, this leaves a complete checkpoint or a temporary file for
    `complete_or_remove`.
    """
    sidecar, temporary = (checkpoint_path(folder, step, end) for end in (".json", ".json.tmp"))
    sidecar.replace(temporary)
    checkpoint_path(folder, step, ".pt").unlink(missing_ok=True)
    temporary.unlink()


def set_aside(path: Path) -> None:
    """Rename what is at `path` to `.damaged`, or to `.damaged.2` and so on if that name exists."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.damaged.{number}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)


def short(value: Any) -> str:
    """Return `value` as Python writes it, in at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


class _HashedFile:
    """A file that hashes what is written, and remembers the error that torch would hide."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha256, self.size = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(data)
        self.size += written
        return written

    def flush(self) -> None:
        self.file.flush()
