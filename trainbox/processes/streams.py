"""Standard streams that are always open and outlive their readers, and lines for people."""

import contextlib
import io
import math
import os
import select
import sys
from typing import Any, TextIO

_MOST_WAIT_S = 10.0
_LOOK_EVERY_S = 0.2
_LONGEST_MESSAGE = 1000
_LONGEST_VALUE = 200  # a longer word of a message that is too long would hide the reason


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


def printable(text: str, keep: str = "") -> str:
    """Return `text` with control characters as escapes, except the characters in `keep`.

    Text from another machine must not move the cursor or colour the terminal.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def message_line(text: str) -> str:
    """Return `trainbox: TEXT` as one printable line of at most 1000 characters of text."""
    words = text.split()
    if len(text) > _LONGEST_MESSAGE:
        words = [w if len(w) <= _LONGEST_VALUE else f"{w[:80]}...{w[-20:]}" for w in words]
    return f"trainbox: {printable(' '.join(words)[:_LONGEST_MESSAGE])}"


def last_message(output: str) -> str | None:
    """Return the text of the last `message` in the output of a process, or None."""
    begin = message_line("")
    found = [line for line in map(str.strip, output.splitlines()) if line.startswith(begin)]
    return found[-1].removeprefix(begin) if found else None


def message(text: str, file: TextIO | None = None) -> None:
    """Print `message_line(text)`; see `say`."""
    say(message_line(text), file)


def say(text: str, file: TextIO | None = None) -> None:
    """Print the line `text`, by default to standard error, with control characters as escapes.

    A closed pipe or a full disk must not stop the training that this process supervises. If
    writing fails, the stream becomes /dev/null.
    """
    file = file or sys.stderr
    try:
        file.flush()
        line = f"{printable(text)}\n".encode(file.encoding, file.errors or "strict")
        write_all(file.fileno(), line)
    except io.UnsupportedOperation:  # a stream in memory
        print(printable(text), file=file)
    except OSError:
        discard(file.fileno())


def show_progress(text: str = "") -> None:
    """Replace the last progress by `text`, in one line of standard error, if this is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def outlive_readers() -> None:
    """Drop output that cannot be written from now on, so that a training continues without it.

    The reader of a pipe may have ended, or the disk may be full.
    """
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


class _Lasting(io.FileIO):
    """A stream that becomes /dev/null when a write fails."""

    def write(self, data: Any, /) -> int:
        try:
            write_all(self.fileno(), data)
        except OSError:
            discard(self.fileno())
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


def discard(descriptor: int) -> None:
    """Let the descriptor write to /dev/null from now on."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), descriptor)


class Readers:
    """How long a write waits for a reader that reads nothing, such as a pager."""

    most_s = math.inf


def stop_waiting_for_readers() -> None:
    """From now on, drop the output of a stream whose reader reads nothing for ten seconds.

    Call this at the request to stop, which a reader must not delay for ever.
    """
    Readers.most_s = _MOST_WAIT_S


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, also if another program has set the stream to non-blocking.

    Raises:
        OSError: The write failed.
    """
    rest = memoryview(data).cast("B")
    room = select.poll()  # `select.select` refuses a descriptor above 1023
    room.register(descriptor, select.POLLOUT)
    waited_s = 0.0
    while rest:
        if not room.poll(1000 * _LOOK_EVERY_S):
            waited_s += _LOOK_EVERY_S
            if waited_s > Readers.most_s:
                discard(descriptor)
                return
            continue
        with contextlib.suppress(BlockingIOError):
            # A pipe with room takes this many bytes without waiting.
            rest = rest[os.write(descriptor, rest[: select.PIPE_BUF]) :]
            waited_s = 0.0
