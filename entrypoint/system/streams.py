"""Standard streams that are always open, and lines without control characters.

`trainer.system.streams` does this for the trainer. Each command imports this file, and an import of
the package `trainbox`, where both could share it, takes longer than the rest of the file.
"""

import contextlib
import os
import sys
from typing import Any, TextIO

_LONGEST_MESSAGE = 1000


def open_streams() -> None:
    """Open closed standard streams on /dev/null, and escape characters that they cannot encode.

    If a stream stayed closed, the next file that is opened would get its number. Printed lines
    would then land in this file, which may be a checkpoint. Child processes inherit /dev/null. A
    character that the encoding does not have is written as \\xe4.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest free number, which is this one.
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _opened(1, sys.stdout), _opened(2, sys.stderr)


def _opened(number: int, stream: Any) -> Any:
    if stream is None:
        return open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    stream.reconfigure(errors="backslashreplace")
    return stream


def say(text: str, file: TextIO | None = None) -> None:
    """Print the line `text`, by default to standard error, with control characters as escapes.

    A closed pipe or a full disk must not stop the training that this process supervises. If
    writing fails, the stream becomes /dev/null.
    """
    file = file or sys.stderr
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    try:
        print(line, file=file, flush=True)
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), file.fileno())


def message(text: str, file: TextIO | None = None) -> None:
    """Print `trainbox: TEXT` as one line of at most 1000 characters; see `say`."""
    say(f"trainbox: {' '.join(text.split())[:_LONGEST_MESSAGE]}", file)
