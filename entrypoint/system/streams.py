"""Print lines without control characters, also to a stream whose reader has ended."""

import contextlib
import io
import os
import sys
from typing import TextIO

from trainbox.contract.streams import write_in_time

_LONGEST_MESSAGE = 1000
# The supervisor of a training prints, and its deadlines must not wait for a paused terminal.
_UNREAD_S = 5.0


def say(text: str, file: TextIO | None = None) -> None:
    """Print the line `text`, by default to standard error, with control characters as escapes.

    A closed pipe or a full disk must not stop the training that this process supervises. If
    writing fails, the stream becomes /dev/null. A reader that does not read, such as a paused
    terminal, loses the line after 5 s.
    """
    file = file or sys.stderr
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    try:
        file.flush()
        write_in_time(
            file.fileno(), f"{line}\n".encode(file.encoding, file.errors or "strict"), _UNREAD_S
        )
    except io.UnsupportedOperation:  # a stream in memory
        print(line, file=file)
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), file.fileno())


def message(text: str, file: TextIO | None = None) -> None:
    """Print `trainbox: TEXT` as one line of at most 1000 characters; see `say`."""
    say(f"trainbox: {' '.join(text.split())[:_LONGEST_MESSAGE]}", file)
