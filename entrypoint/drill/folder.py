"""The files that a script writes into its run folder, and the steps that it reports."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from entrypoint.script.folder import CONFIG, LOGS, MANIFEST, METRICS, OWN_KINDS

# `trainbox run` writes these itself.
_OWN_NAMES = {
    CONFIG,
    f"{CONFIG}.new",
    MANIFEST,
    f"{MANIFEST}.new",
    METRICS,
    LOGS,
    "lock",
    "tensorboard",
}


@dataclass(frozen=True)
class Version:
    """A version of a file; each write changes it."""

    inode: int
    size: int
    time_ns: int


def versions(run: Path) -> dict[str, Version]:
    """Return the script's files in its run folder, by their path in it."""
    found = {}
    for folder, folders, files in os.walk(run):
        if Path(folder) == run:
            folders[:] = [name for name in folders if name not in _OWN_NAMES]
            files = [name for name in files if name not in _OWN_NAMES]  # noqa: PLW2901
        for name in files:
            path = Path(folder, name)
            if version := version_of(path):
                found[str(path.relative_to(run))] = version
    return found


def version_of(path: Path) -> Version | None:
    """Return the version of a file, or None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Version(found.st_ino, found.st_size, found.st_mtime_ns)


class StepReader:
    """Reads the steps that are appended to metrics.jsonl, each of them once.

    Entries of `trainbox run` itself are skipped, and lines that are not JSON.
    """

    def __init__(self, run: Path, from_end: bool = False) -> None:
        self._path = run / METRICS
        version = version_of(self._path)
        self._position = version.size if from_end and version else 0

    def read(self) -> list[int]:
        """Return the steps in the complete lines since the last call."""
        try:
            with self._path.open("rb") as file:
                # The script may have replaced the file by a shorter one.
                self._position = min(self._position, file.seek(0, os.SEEK_END))
                file.seek(self._position)
                new, end, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._position += len(new) + len(end)
        return [step for line in new.split(b"\n") if (step := _step(line)) is not None]


def steps(run: Path) -> list[int]:
    """Return the steps in metrics.jsonl in the order of its lines."""
    return StepReader(run).read()


def _step(line: bytes) -> int | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("kind") in OWN_KINDS:
        return None
    return step if type(step := entry.get("step")) is int else None
