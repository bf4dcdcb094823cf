"""One run's folder: its lock, its JSON files, metrics.jsonl and digests.jsonl."""

import fcntl
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainbox.contract.errors import WrongUse
from trainbox.contract.files import append_line, append_regular, read_object, read_text, replacing
from trainbox.contract.sidecar import FIRST_CHECKPOINT
from trainbox.contract.storage import storage_failure
from trainer.run.jsonl import read_entries

SETTINGS, MANIFEST = "config.json", "manifest.json"
METRICS, DIGESTS = "metrics.jsonl", "digests.jsonl"
WEIGHTS, _LOCK = "model.safetensors", "lock"


def finite_or_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` for JSON, which has no infinity and no NaN: both become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


class RunFolder:
    """The folder of one run. Only the first rank `writes`."""

    def __init__(self, path: Path, writes: bool) -> None:
        """Make the folder with its subfolders, and lock it.

        Raises:
            StorageFailure: The folder cannot be written.
            WrongUse: Another process trains in it, or it is not a run and has files that a run
                would replace.
        """
        self.path, self.writes = path, writes
        if writes:
            _refuse_files_of_others(path)
        try:
            for folder in ("checkpoints", "logs"):
                (path / folder).mkdir(parents=True, exist_ok=True)
            self._lock = append_regular(path / _LOCK) if writes else None
        except OSError as error:
            raise storage_failure(path, error) from error
        if self._lock is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock.close()
                raise WrongUse(
                    f"another process trains in {path}: wait until it ends, or choose another "
                    "folder with --run NAME"
                ) from None

    def read_config_text(self) -> str | None:
        """Return the text of config.json, or None if the run is new.

        Raises:
            WrongUse: The file exists and cannot be read.
        """
        path = self.path / SETTINGS
        try:
            return read_text(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WrongUse(
                f"{path} cannot be read ({reason}): restore it, or start a new run with --run NAME"
            ) from error

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the object in the file `name`, or None if the file is missing or damaged."""
        try:
            return read_object(self.path / name)
        except (OSError, ValueError):
            return None

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace the file `name` by an object, as `write_text` does."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Replace the file `name` atomically.

        Raises:
            StorageFailure: The file cannot be written.
        """
        if not self.writes:
            return
        try:
            with replacing(self.path / name) as file:
                file.write(text.encode())
        except OSError as error:
            raise storage_failure(self.path / name, error) from error

    def has_had_a_checkpoint(self) -> bool:
        """Return whether a checkpoint was ever completed in this folder."""
        return (self.path / FIRST_CHECKPOINT).exists()

    def cut_records(self, step: int, evaluated_step: int) -> list[str]:
        """Drop the entries after `step`, which the resumed run will write again.

        Validations are kept up to `evaluated_step`. Return the names of the records that have lost
        their entries.

        Raises:
            StorageFailure: A record cannot be read or written.
        """
        lost = []
        # All hardware events are kept, because a resumed run does not repeat them.
        last = {"validation": evaluated_step, "health": math.inf}
        for name in (METRICS, DIGESTS):
            path = self.path / name
            entries = read_entries(path)
            may_be_empty = name == METRICS and path.exists() and path.stat().st_size == 0
            if step and not entries and not may_be_empty:
                lost.append(name)
            kept = [entry for entry in entries if entry["step"] <= last.get(entry["kind"], step)]
            if step == 0 and name == DIGESTS:
                kept = []  # the digests of the start are written again
            self.write_text(name, "".join(json.dumps(entry) + "\n" for entry in kept))
        return lost

    def append(self, name: str, entry: Mapping[str, Any], durable: bool = False) -> None:
        """Append an entry to the record `name`. It is `durable` if it is on the disk at the end.

        Raises:
            StorageFailure: The file cannot be written.
        """
        if not self.writes:
            return
        try:
            append_line(self.path / name, json.dumps(finite_or_null(entry)), durable)
        except OSError as error:
            raise storage_failure(self.path / name, error) from error

    def close(self) -> None:
        """Release the lock, so that another process can train in this folder."""
        if self._lock is not None:
            self._lock.close()


def _refuse_files_of_others(path: Path) -> None:
    """Refuse a folder that is not a run, and has files that a run would replace.

    Each run has a lock. If a copy of a run lacks its lock, the settings or the manifest show that
    it is a run.
    """
    of_a_run = (_LOCK, SETTINGS, MANIFEST, FIRST_CHECKPOINT)
    if any((path / name).exists() for name in of_a_run):
        return
    if found := [name for name in (METRICS, DIGESTS, WEIGHTS) if (path / name).is_file()]:
        raise WrongUse(
            f"{path} is not a run, and its {', '.join(found)} would be replaced: choose another "
            "--run name, or move the files away"
        )
