"""Wait only a short time for a server, and name the cause of a failed download."""

import contextlib
import socket
from collections.abc import Iterator

_ANSWER_S = 5.0


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Give up the downloads of the body if a server does not answer for some seconds.

    Without a limit, a firewall that drops packets delays the message for minutes.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_ANSWER_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def cause(error: Exception) -> str:
    """Return the cause of a failed download. torchvision's error lists a cause for each mirror."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
