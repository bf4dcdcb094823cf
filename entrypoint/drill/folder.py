"""The files that a script writes into its run folder, and the steps that it reports."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from entrypoint.drill.starts import complete_lines
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


def steps(run: Path) -> list[int]:
    """Return the steps in metrics.jsonl in the order of its lines.

    Entries of `trainbox run` itself are skipped, and lines that are not JSON.
    """
    found = []
    for line in complete_lines(run / METRICS):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if (
            isinstance(entry, dict)
            and type(entry.get("step")) is int
            and entry.get("kind") not in OWN_KINDS
        ):
            found.append(entry["step"])
    return found
