"""Standard streams that are always open."""

import os
import sys
from typing import Any


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
