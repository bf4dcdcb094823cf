"""The connected nodes of a job, which report their ends to each other during the training.

Each other node keeps its connection to node 0 open. TCP keepalive shows whether the other machine
still answers.
"""

import ipaddress
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainbox.errors import ExitCode
from trainer.programs.ranks.messages import Connection, End

_SIOCGIFADDR = 0x8915  # Linux: read the IPv4 address of an interface


@dataclass(frozen=True)
class Meeting:
    """The connected nodes of a job.

    `address` is the address of node 0, and `store_port` is the port for torch's store. `store` is
    the listening socket of the store on node 0, and None on other nodes. `processes` has the number
    of ranks of each node. On node 0, `connections` has the connections to all other nodes; on other
    nodes, it has the connection to node 0.
    """

    address: str
    store_port: int
    store: socket.socket | None
    processes: tuple[int, ...]
    connections: tuple[Connection, ...]

    @property
    def interface(self) -> str | None:
        """The name of the network interface by which this node reaches the other nodes.

        None if the connection uses another than the first IPv4 address of its interface. None on
        systems other than Linux.
        """
        return _interface_of(self.connections[0].socket.getsockname()[0])

    def watch(self, on_end: Callable[[End], None]) -> None:
        """Call `on_end`, on a new thread, when another node exits or is lost.

        If it returns, it is called again for the next node. Node 0 forwards failures, because the
        other nodes have no connections to each other.
        """
        threading.Thread(target=self._watch, args=(on_end,), daemon=True).start()

    def leave(self, code: int) -> None:
        """Report to the other nodes that this node exits with `code`."""
        for connection in self.connections:
            connection.send({"ended": code})

    def _watch(self, on_end: Callable[[End], None]) -> None:
        """Wait for the ends of the other nodes, forward failures and call `on_end`."""
        with selectors.DefaultSelector() as selector:
            for connection in self.connections:
                selector.register(connection, selectors.EVENT_READ, connection)
            while selector.get_map():
                # Wait until a node reports its end, or until its connection breaks.
                (key, _), *_ = selector.select()
                if (end := _end_of(key.data)) is None:
                    continue
                selector.unregister(key.fileobj)
                # Forward a failure before this node acts on it. The node that failed needs no
                # report.
                if end.code == ExitCode.NETWORK:
                    for connection in self.connections:
                        if connection is not key.data:
                            connection.send({"lost": end.what})
                on_end(end)


def _end_of(connection: Connection) -> End | None:
    """Return the end that `connection` reports, or None if its message is not complete yet.

    If the connection is broken, the node is lost.
    """
    try:
        message = connection.read()
        return None if message is None else End.parse(message, connection.name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return End(f"{connection.name} is lost ({reason})", ExitCode.NETWORK)


def _interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`, or None if it is not found."""
    if sys.platform != "linux":
        return None
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback:
        return "lo"
    # Linux lists IPv6 addresses in a file, and it returns the first IPv4 address by an ioctl.
    if ip.version == 6:
        rows = [
            row.split()
            for row in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines()
        ]
        return next((row[5] for row in rows if int(row[0], 16) == int(ip)), None)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # the interface has no IPv4 address
            if answer[20:24] == ip.packed:
                return name
    return None
