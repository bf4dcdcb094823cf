"""The folder of a run, with the records that only one process writes."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

from trainbox.errors import WrongUse, signal_name
from trainbox.files.entries import plain
from trainbox.files.regular_files import (
    append_line,
    object_if_valid,
    replacing,
)
from trainbox.folders.lease import LEASE, Lease
from trainbox.folders.write_failures import writing

CONFIG, MANIFEST, METRICS, LOGS = "config.json", "manifest.json", "metrics.jsonl", "logs"
DIFF = "changes.diff"  # of a script: what differs from the revision of its repository
DIGESTS = "digests.jsonl"
WEIGHTS = "model.safetensors"  # of the best step of a training
CHECKPOINTS, REHEARSAL = "checkpoints", "rehearsal"  # folders in the folder of a training
EVENTS = "events.out.tfevents."  # how the names of TensorBoard's files begin
CURVES = "curves.png"
PICTURES = "pictures"  # the folder of the pictures of the best step
TEXTS = "sources"  # the folder of texts in the run folder of a script
_WRITTEN = frozenset({CONFIG, MANIFEST, METRICS, LOGS, LEASE, TEXTS})
# What `trainbox run` itself writes in the run folder of a script.
OWN_NAMES = _WRITTEN | {f"{name}.tmp" for name in (CONFIG, MANIFEST)}
STUDY = "study.journal"  # in the folder of a sweep
# Logs, tables, settings, pictures, caches and unfinished files: a script can write them in each
# start without a checkpoint.
_NO_CHECKPOINTS = (
    *(".csv", ".err", ".jsonl", ".log", ".out", ".tsv", ".txt", ".wandb", ".yaml", ".yml"),
    *(".jpg", ".png", ".svg", ".lock", ".part", ".pid", ".pyc", ".tmp"),
)
_SMALL_BYTES = 2**16  # Of such a file, the content is compared: each start may write it again.


def is_sweep(folder: Path) -> bool:
    """Return whether a sweep has its trials in the folder."""
    with contextlib.suppress(PermissionError):
        return (folder / STUDY).is_file()
    return False


class SavedFile(NamedTuple):
    """A file that a script has saved: its time, and the SHA-256 of the content if it is small."""

    time_s: float
    content: bytes | None


def saved_files(run: Path) -> dict[str, SavedFile]:
    """Return the files in its run folder from which a script may resume."""
    found = dict[str, SavedFile]()
    for folder, folders, files in os.walk(run):
        own = OWN_NAMES if Path(folder) == run else ()
        folders[:] = [name for name in folders if name not in own]
        for path in (Path(folder, name) for name in files if name not in own):
            if path.name.startswith(EVENTS) or path.suffix.lower() in _NO_CHECKPOINTS:
                continue
            with contextlib.suppress(OSError):
                stat, content = path.lstat(), None
                if S_ISREG(stat.st_mode) and stat.st_size <= _SMALL_BYTES:
                    content = hashlib.sha256(path.read_bytes()).digest()
                found[str(path.relative_to(run))] = SavedFile(stat.st_mtime, content)
    return found


def has_saved(run: Path, before: Mapping[str, SavedFile]) -> bool:
    """Return whether a script has saved anything new; `before` has its earlier `saved_files`."""
    return any(
        (old := before.get(name)) is None
        or (file.content != old.content if file.content is not None else file != old)
        for name, file in saved_files(run).items()
    )


def ended_by(number: int, run: Path) -> str:
    """Return the message for a script with the folder `run` that the signal `number` has ended."""
    begin = f"{signal_name(number)} has ended the script"
    if not (found := saved_files(run)):
        return f"{begin}, which has saved no file in its run folder: it begins again"
    time_s, name = max((file.time_s, name) for name, file in found.items())
    return (
        f"{begin}: what it has done since its newest file in the run folder ({name}, "
        f"{max(0.0, time.time() - time_s):.0f} s ago) is lost, unless it was saved elsewhere"
    )


class RecordFolder:
    """The folder of one run. The process that `writes` its records has its lease."""

    def __init__(self, path: Path, writes: bool, subfolders: Sequence[str]) -> None:
        """Make the folder with its `subfolders`, and take its lease.

        Raises:
            StorageFailure: the folder cannot be written.
            WrongUse: another process uses it.
        """
        self.path, self.writes, self._subfolders = path, writes, subfolders
        with writing(path):
            for name in subfolders:
                (path / name).mkdir(parents=True, exist_ok=True)
            self._lease = Lease(path) if writes else None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the object in the file `name`, or None if the file is missing or damaged."""
        return object_if_valid(self.path / name)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace the file `name` by an object, as `write_text` does."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Replace the file `name` atomically.

        Raises:
            StorageFailure: the file cannot be written.
        """
        if not self.writes:
            return
        self.renew()
        with writing(self.path / name), replacing(self.path / name) as file:
            file.write(text.encode())

    def append(self, name: str, entry: Mapping[str, Any], durable: bool = False) -> None:
        """Append an entry to the record `name`, as `append_line` does.

        JSON has neither infinity nor NaN, which become null.

        Raises:
            StorageFailure: the file cannot be written.
        """
        if not self.writes:
            return
        self.renew()
        with writing(self.path / name):
            append_line(self.path / name, json.dumps(plain(entry)), durable)

    def renew(self) -> None:
        """Renew the lease. Call this every few seconds.

        Raises:
            WrongUse: another process has taken the lease over.
        """
        if self._lease is None:
            return
        self._lease.renew()
        if self._lease.lost:
            raise WrongUse(
                f"another process has taken {self.path} over: this one was suspended for some "
                f"minutes, or the file {LEASE} was removed or replaced: wait until it ends, or "
                "choose another folder with --run NAME"
            )

    def close(self) -> None:
        """Release the lease, so that another process can use the folder.

        A folder without any record, as after a refused training, is removed.
        """
        lease, self._lease = self._lease, None
        if lease is None or lease.lost:
            return
        if not (self.path / MANIFEST).exists():
            with contextlib.suppress(OSError):  # something is in it
                for log in (self.path / LOGS).iterdir():
                    if not log.stat().st_size:
                        log.unlink()
                for name in reversed(self._subfolders):
                    (self.path / name).rmdir()
        lease.release()
        with contextlib.suppress(OSError):  # it has records
            self.path.rmdir()
