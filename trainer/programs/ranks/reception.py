"""Let nodes connect to node 0, and limit what strangers can use.

Every program that reaches the port can connect. Its errors close only its own connection.
"""

import selectors
import socket
import time

from trainbox.errors import ExitCode
from trainer.programs.ranks.messages import Connection, Hello, Refusal
from trainer.programs.ranks.node import LOOK_EVERY_S, Log, Node

# Limits on strangers: open connections without a hello, seconds until the hello, lines in the log.
_MOST_GUESTS, _HELLO_S, _MOST_COMPLAINTS = 64, 10.0, 20
_OWN_RANK = "give each machine a --node-rank of its own"


class Reception:
    """The connections to node 0 until all nodes have joined.

    `joined` has the connection and the hello of each node that has joined, by rank.
    """

    def __init__(self, node: Node, listener: socket.socket, log: Log) -> None:
        self.joined: dict[int, tuple[Connection, Hello]] = {}
        self._node, self._listener, self._log = node, listener, log
        # When the connections without a hello are closed, in the order of arrival.
        self._guests: dict[Connection, float] = {}
        self._logged: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> "Reception":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in [*self._guests, *(connection for connection, _ in self.joined.values())]:
            connection.socket.close()
        self._selector.close()
        self._listener.close()

    def take(self) -> list[tuple[Connection, Hello]]:
        """Return what `joined` has, by rank. These connections stay open."""
        joined, self.joined = self.joined, {}
        return [joined[rank] for rank in sorted(joined)]

    def look(self) -> None:
        """Process what arrives within a second, and close connections without a hello in time."""
        now = time.monotonic()
        for guest in [guest for guest, until_s in self._guests.items() if until_s < now]:
            self._drop(guest)
        for key, _ in self._selector.select(LOOK_EVERY_S):
            if key.data is None:
                self._accept()
            elif key.data.fileno() >= 0:  # negative: closed earlier in this round
                self._read(key.data)

    def _accept(self) -> None:
        """Accept a connection as a guest, and close the oldest guest if there are too many."""
        # Close the oldest guest: a node sends its hello at once. A slow node connects again.
        while len(self._guests) >= _MOST_GUESTS:
            self._drop(next(iter(self._guests)))
        try:
            accepted, peer = self._listener.accept()
        except OSError:  # the peer has closed it, or this process has too many open files
            if self._guests:
                self._drop(next(iter(self._guests)))
            else:
                time.sleep(LOOK_EVERY_S)
            return
        try:
            connection = Connection(accepted, peer[0])
            self._selector.register(connection, selectors.EVENT_READ, connection)
        except OSError:
            accepted.close()
            return
        self._guests[connection] = time.monotonic() + _HELLO_S

    def _read(self, connection: Connection) -> None:
        """Read a hello from `connection`, and close it if it sends anything else."""
        try:
            message = connection.read()
            if message is None:
                return
            if connection not in self._guests:
                raise ValueError("a node sent a message after it joined")
            hello = Hello.parse(message)
        except (OSError, ValueError):
            self._drop(connection)
            return
        self._admit(connection, hello)

    def _admit(self, connection: Connection, hello: Hello) -> None:
        """Let the node that has sent `hello` join, or log and send why it may not."""
        name = f"node {hello.rank} ({hello.host}, {connection.name})"
        earlier = self.joined.get(hello.rank)
        if refusal := refused(self._node, hello, name, earlier and (earlier[0].name, earlier[1])):
            self._log_once(refusal.refused)
            self._refuse(connection, refusal)
            return
        # The node was restarted. The end of its earlier connection may not have arrived yet.
        if earlier is not None:
            reason = f"{name} replaces {earlier[0].name}"
            self._log_once(reason)
            self._refuse(earlier[0], Refusal(f"{reason}: {_OWN_RANK}", ExitCode.WRONG_USE))
        connection.name = name
        del self._guests[connection]
        self.joined[hello.rank] = connection, hello

    def _refuse(self, connection: Connection, refusal: Refusal) -> None:
        connection.send(refusal._asdict())
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """Close `connection`, and forget its guest or its node."""
        self._selector.unregister(connection)
        connection.socket.close()
        self._guests.pop(connection, None)
        joined = self.joined.items()
        self.joined = {rank: pair for rank, pair in joined if pair[0] is not connection}

    def _log_once(self, text: str) -> None:
        """Log `text` once.

        The number of lines is limited, because a stranger can try as often as it wants.
        """
        if text not in self._logged and len(self._logged) < _MOST_COMPLAINTS:
            self._logged.add(text)
            self._log(text)


def refused(
    node: Node, hello: Hello, name: str, earlier: tuple[str, Hello] | None
) -> Refusal | None:
    """Return why the node `name` may not join `node`, or None.

    `earlier` is the node that has joined with the same rank: a node that was restarted on its
    machine may join again. The exit code for another job is 7, because its scheduler may try
    again when the port is free.
    """
    if hello.job != node.job:
        return Refusal(
            f"{name} is of job {hello.job}, but job {node.job} uses {node.endpoint}: give each job "
            "an endpoint of its own",
            ExitCode.NETWORK,
        )
    if hello.nnodes != node.nnodes:
        return Refusal(
            f"{name} was started for {hello.nnodes} nodes, but node 0 for {node.nnodes}: "
            "set --nnodes to the same number on each node",
            ExitCode.WRONG_USE,
        )
    if earlier is not None and earlier[1].host != hello.host:
        return Refusal(
            f"{earlier[0]} and {name} have the same rank: {_OWN_RANK}", ExitCode.WRONG_USE
        )
    return None
