"""Whether a port of this machine is in use, as Linux lists it."""

import threading
from pathlib import Path

# A connection that was closed is listed for a minute.
_LOOK_EVERY_S = 1.0


class PortWatch:
    """Notes whether anything listens or connects at a port, until this process ends."""

    def __init__(self, port: int, known: int, folder: Path = Path("/proc/net")) -> None:
        """Watch `port`. Something listens at the port `known`, so the system lists this port."""
        self._port, self._folder = port, folder
        self._is_seen = known not in used_ports(folder)  # such as outside of Linux
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
        self._is_seen = self._is_seen or self._port in used_ports(self._folder)


def used_ports(folder: Path) -> set[int]:
    """Return the local and remote ports of all TCP sockets; empty if they are not listed."""
    found = set[int]()
    for name in ("tcp", "tcp6"):
        try:
            lines = (folder / name).read_text().splitlines()[1:]
        except OSError:  # without IPv6
            continue
        found |= {int(end.rpartition(":")[2], 16) for line in lines for end in line.split()[1:3]}
    return found
