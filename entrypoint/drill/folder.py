"""The files that a script writes into its run folder, and the steps that it reports."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrypoint.script.folder import CONFIG, LOGS, MANIFEST, METRICS
from entrypoint.script.sources import BOARD, TEXTS
from trainbox.contract.entries import EntryReader, is_of_script

# `trainbox run` writes these itself.
_OWN_NAMES = {
    CONFIG,
    f"{CONFIG}.tmp",
    MANIFEST,
    f"{MANIFEST}.tmp",
    METRICS,
    LOGS,
    "lock",
    TEXTS,
    BOARD,
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


def reported_steps(run: Path) -> list[int]:
    """Return the steps that were reported in the run folder so far."""
    return steps(EntryReader(run / METRICS).read())


def steps(entries: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the steps that the script has reported, in the order of the entries."""
    found = (entry.get("step") for entry in entries if is_of_script(entry))
    return [step for step in found if type(step) is int]
