"""Standard streams that are always open, and text without control characters."""

import contextlib
import io
import os
import sys
from typing import Any

_LONGEST_MESSAGE = 1000


def open_streams() -> None:
    """Make standard input, output and error usable, whatever the caller has done to them.

    A closed one becomes /dev/null: otherwise the next file that is opened, a checkpoint for
    example, would take its number and receive what is printed. A character that the encoding does
    not have is written as \\xe4.
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


def outlive_readers() -> None:
    """From now on drop what nobody reads, or what a full disk does not take: a training goes on
    without its output.
    """
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


class _Lasting(io.FileIO):
    """A stream that becomes /dev/null where a write fails."""

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
    """Return `text` with control characters as escapes: a peer's name must not move the cursor or
    colour the terminal.
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def message(text: str) -> str:
    """Return `trainbox: TEXT` as one printable line of at most 1000 characters of text."""
    return f"trainbox: {printable(' '.join(text.split()))[:_LONGEST_MESSAGE]}"
