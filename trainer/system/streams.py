"""Standard streams that are always open, and text without control characters."""

import contextlib
import io
import os
import sys
from typing import Any

_LONGEST_MESSAGE = 1000


def open_streams() -> None:
    """Make standard input, output and error usable.

    A closed stream becomes /dev/null. Otherwise, the next file that is opened would get its number
    and receive the output, for example a checkpoint. A character that the encoding does not have is
    written as an escape such as \\xe4.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # os.open uses the lowest free number, which is this one.
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


def outlive_readers() -> None:
    """Drop output that cannot be written from now on, so that a training continues without it.

    The reader of a pipe may have ended, or the disk may be full.
    """
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


class _Lasting(io.FileIO):
    """A stream that becomes /dev/null when a write fails."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
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
