"""Read the entries of a metrics.jsonl to which other processes append."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from trainbox.contract.files import open_regular

OWN_KINDS = ("health", "gpus")  # entries that `trainbox run` itself writes


class EntryReader:
    """Reads the entries of a growing file, each of them once.

    A line that is not a JSON object is skipped. An incomplete last line is read by a later call.

    Attributes:
        position: the number of bytes before the first entry that is not read yet.
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path, self.position = path, position

    @classmethod
    def at_end(cls, path: Path, last_bytes: int = 0) -> Self:
        """Return a reader that begins with the last `last_bytes` bytes of the file."""
        try:
            size = path.stat().st_size
        except OSError:  # the file does not exist yet
            size = 0
        return cls(path, max(0, size - last_bytes))

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the new entries; none if the file is missing or cannot be read."""
        try:
            with open_regular(self._path) as file:
                if file.seek(0, os.SEEK_END) < self.position:
                    self.position = 0  # the script has replaced the file
                file.seek(self.position)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self.position += len(line)
                    if (entry := parsed(line)) is not None:
                        yield entry
        except OSError:
            return


def is_of_script(entry: Mapping[str, Any]) -> bool:
    """Return whether the script has reported the entry, and not `trainbox run` itself."""
    return entry.get("kind") not in OWN_KINDS


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in `line`, or None."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
