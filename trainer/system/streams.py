"""Standard streams that outlive their readers, and text without control characters."""

import contextlib
import io
import os
import sys
from typing import Any

from trainbox.contract.streams import write_in_time

_LONGEST_MESSAGE = 1000
# A line beside the progress bar is written to both streams. Both waits together are shorter than
# the time limit of an exchange with this process.
_UNREAD_S = 120.0


def outlive_readers() -> None:
    """Drop output that cannot be written from now on, so that a training continues without it.

    The reader of a pipe may have ended, or the disk may be full. A reader that does not read, such
    as a paused terminal, loses lines after 2 minutes.
    """
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


class _Lasting(io.FileIO):
    """A stream that becomes /dev/null when a write fails, and drops what is not read in time."""

    _patience_s = _UNREAD_S

    def write(self, data: Any, /) -> int:
        try:
            # After a line that is not read in time, the next write does not wait again.
            in_time = write_in_time(self.fileno(), data, self._patience_s)
            self._patience_s = _UNREAD_S if in_time else 0.0
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), self.fileno())
        return memoryview(data).nbytes


def _lasting(stream: Any) -> io.TextIOWrapper:
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _Lasting(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def printable(text: str, keep: str = "") -> str:
    """Return `text` with control characters as escapes, except for those in `keep`.

    Text from another machine must not move the cursor or colour the terminal.
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def message_line(text: str) -> str:
    """Return `trainbox: TEXT` as one printable line of at most 1000 characters of text."""
    return f"trainbox: {printable(' '.join(text.split()))[:_LONGEST_MESSAGE]}"
