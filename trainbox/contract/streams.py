"""Standard streams that are always open, and writes that do not wait without a limit."""

import os
import select
import stat
import sys
import time
from typing import Any

_AGAIN_S = 0.05  # until the next attempt, if a terminal has room for a part of a line


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


def write_in_time(descriptor: int, data: bytes | memoryview, limit_s: float) -> bool:
    """Write `data`, and return whether all of it was written within `limit_s` seconds.

    Raises:
        OSError: The write failed.
    """
    deadline_s = time.monotonic() + limit_s
    rest = memoryview(data).cast("B")
    written_to = _without_waiting(descriptor)
    try:
        while rest:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            if not select.select((), (written_to,), (), left_s)[1]:
                return False
            try:
                # A part of this size never blocks when the reader of a pipe has made room.
                rest = rest[os.write(written_to, rest[: select.PIPE_BUF]) :]
            except BlockingIOError:
                if not left_s:
                    return False
                time.sleep(min(_AGAIN_S, left_s))
    finally:
        if written_to != descriptor:
            os.close(written_to)
    return True


def _without_waiting(descriptor: int) -> int:
    """Return another descriptor of a terminal or a pipe, whose writes never wait.

    A write of a line waits if a terminal has room for only a part of it. Other processes share the
    flags of `descriptor`, so these do not change. If the system refuses another one, return
    `descriptor`.
    """
    if os.isatty(descriptor) or stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        try:
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # such as the terminal of another user
            pass
    return descriptor
