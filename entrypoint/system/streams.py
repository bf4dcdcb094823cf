"""Standard streams that are always open, and lines without control characters.

`trainer.system.streams` does the same: the packages do not import each other.
"""

import contextlib
import os
import sys
from typing import Any, TextIO

_LONGEST_MESSAGE = 1000


def open_streams() -> None:
    """Make standard input, output and error usable, whatever the caller has done to them.

    A closed one becomes /dev/null, here and in what is started from here: otherwise the next file
    that is opened, a checkpoint for example, would take its number and receive what is printed. A
    character that the encoding does not have is written as \\xe4.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # takes the lowest free number, which is this one
            nothing = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nothing, True)
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

    A reader that has left or a full disk does not stop what is supervised: from then on the stream
    is /dev/null.
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
