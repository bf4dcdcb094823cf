"""Read the files of a run's folder. Anybody can have changed them: only regular files, up to a size, as UTF-8."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import IO, Any

_MOST_BYTES = 2**30  # a year of metrics; a sparse or endless file must not fill the memory


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file to read it, or a link to one; a FIFO would block and a folder has no content.

    Raises:
        OSError: missing, unreadable or not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: Path, most_bytes: int = _MOST_BYTES) -> str:
    """Return the file's text.

    Raises:
        OSError: missing, unreadable or not a regular file.
        ValueError: not UTF-8, or more than `most_bytes`.
    """
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    return data.decode()


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file.

    Raises:
        OSError: missing, unreadable or not a regular file.
        ValueError: not UTF-8, not JSON, or not an object.
    """
    return parse_object(read_text(path))


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object in `text`.

    Raises:
        ValueError: not JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
