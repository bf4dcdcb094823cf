"""Whether a port of this machine is in use, as Linux lists it."""

import threading
from pathlib import Path

# A connection that was closed is listed for a minute.
_LOOK_EVERY_S = 1.0


class PortWatch:
    """Notes whether anything listens or connects at a port, until this process ends.

    Connections of earlier programs, which may have used the same port, do not count.
    """

    def __init__(self, port: int, known: int, folder: Path = Path("/proc/net")) -> None:
        """Watch `port`. Something listens at the port `known`, so the system lists this port."""
        self._port, self._folder = port, folder
        self._earlier = sockets_at(port, folder)
        self._is_seen = not sockets_at(known, folder)  # such as outside of Linux
        self._asked = threading.Event()
        threading.Thread(target=self._watch, name="port", daemon=True).start()

    def is_seen(self) -> bool:
        """Return whether the port was in use, or whether the system does not list ports."""
        self._asked.set()
        self._look()
        return self._is_seen

    def _watch(self) -> None:
        while not self._is_seen and not self._asked.wait(_LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        found = sockets_at(self._port, self._folder)
        self._is_seen = self._is_seen or not found <= self._earlier


def sockets_at(port: int, folder: Path) -> set[tuple[str, ...]]:
    """Return the local and the remote end of each TCP socket with this port at one of its ends."""
    found = set[tuple[str, ...]]()
    for name in ("tcp", "tcp6"):
        try:
            lines = (folder / name).read_text().splitlines()[1:]
        except OSError:  # without IPv6
            continue
        ends = (tuple(line.split()[1:3]) for line in lines)
        found |= {both for both in ends if any(end.endswith(f":{port:04X}") for end in both)}
    return found
