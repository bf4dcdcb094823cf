"""The values of a metrics.jsonl, the entries of one to which other processes append, and CSV."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainbox.errors import WrongUse
from trainbox.files.parsing import parse_object
from trainbox.files.regular_files import open_from

OWN_KINDS = ("health", "gpus")  # entries that `trainbox run` itself writes


class EntryReader:
    """Reads the entries of a growing file, each of them once.

    A line that is not a JSON object is skipped. An incomplete last line is read by a later call.
    """

    def __init__(self, path: Path, last_bytes: int = 2**63) -> None:
        """Read the file, or only its last bytes."""
        self._path, self._last_bytes = path, last_bytes
        self._position = 0  # the number of bytes before the first entry that is not read yet

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the new entries; none if the file is missing or cannot be read."""
        try:
            with open_from(self._path, self._position, self._last_bytes) as file:
                self._position = file.tell()
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._position += len(line)
                    if (entry := parsed(line)) is not None:
                        yield entry
        except OSError:
            return


def newest_entry(path: Path, kind: str | None = None) -> dict[str, Any]:
    """Return the newest entry with a step in the last MiB of a file, or {} without one.

    With `kind`, only entries of this kind count.

    The line that a process is writing, and a line that begins before the bytes that are read, are
    no objects.
    """
    for last_bytes in (2**14, 2**20):  # most files need only the first
        try:
            with open_from(path, 0, last_bytes) as file:
                is_whole, lines = file.tell() == 0, file.read().splitlines()
        except OSError:
            return {}
        for line in reversed(lines):
            if (entry := parsed(line)) is None or not isinstance(entry.get("step"), int):
                continue
            if kind in (None, entry.get("kind")):
                return entry
        if is_whole:
            break
    return {}


def is_of_script(entry: Mapping[str, Any]) -> bool:
    """Return whether the script has reported the entry, and not `trainbox run` itself."""
    return entry.get("kind") not in OWN_KINDS


def step_of(entry: Mapping[str, Any]) -> int | None:
    """Return the step of an entry, or None unless it is a whole number that a float can be."""
    step = entry.get("step")
    return step if type(step) is int and abs(step) <= 2**53 else None


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in `line`, or None."""
    try:
        return parse_object(line)
    except ValueError:
        return None


def plain(value: Any, name: str = "the entry") -> Any:
    """Return `value` as plain JSON, which has no infinity and no NaN: both become null.

    Raises:
        WrongUse: it cannot be written as JSON. `name` is what the message calls it.
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(part, name) for part in value]
    if isinstance(value, Mapping):
        return {str(key): plain(part, name) for key, part in value.items()}
    if hasattr(value, "tolist"):  # a tensor, an array or a number of NumPy
        return plain(value.tolist(), name)
    raise WrongUse(
        f"{name} is a {type(value).__name__}, which JSON does not have: convert it to numbers, "
        "strings or lists"
    )


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return the rows as CSV, whose lines end with a line feed.

    A cell with a carriage return is quoted, because readers take it for the end of a line. Python
    quotes only the characters that end its own lines.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\r\n")
    lines = []
    for row in rows:
        writer.writerow(row)
        lines.append(text.getvalue().removesuffix("\r\n") + "\n")
        text.seek(0)
        text.truncate()
    return "".join(lines)
