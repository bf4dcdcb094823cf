"""Let nodes connect to node 0, and limit what strangers can use.

Every program that reaches the port can connect. Its errors close only its own connection.
"""

import secrets
import selectors
import socket
import time
from dataclasses import dataclass

from trainbox.contract.errors import ExitCode
from trainer.launch.admission import OWN_RANK, Refusal, another_secret, mismatch, taken_rank
from trainer.launch.connection import Connection, NotSigned
from trainer.launch.messages import Hello, nonce
from trainer.launch.node import LOOK_EVERY_S, Log, Node

# Limits on strangers: open connections without a hello, seconds until the hello, lines in the log.
_MOST_GUESTS, _HELLO_S, _MOST_COMPLAINTS = 64, 10.0, 20


@dataclass
class _Guest:
    """A connection whose node has not joined yet. It is `greeted` after the nonces."""

    connection: Connection
    deadline_s: float
    greeted: bool = False


class Reception:
    """The connections to node 0 until all nodes have joined.

    `joined` has the connection and the hello of each node that has joined, by rank.
    """

    def __init__(self, node: Node, listener: socket.socket, log: Log) -> None:
        self.joined: dict[int, tuple[Connection, Hello]] = {}
        self._node, self._listener, self._log = node, listener, log
        self._guests: dict[Connection, _Guest] = {}  # in the order of arrival
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

    def keep(self, connection: Connection) -> socket.socket:
        """Return the socket of `connection`, which stays open when the reception closes."""
        self._forget(connection)
        return connection.socket

    def look(self) -> None:
        """Process what arrives within a second, and close connections without a hello in time."""
        now = time.monotonic()
        for guest in [guest for guest in self._guests.values() if guest.deadline_s < now]:
            self._drop(guest.connection)
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
        self._guests[connection] = _Guest(connection, time.monotonic() + _HELLO_S)

    def _read(self, connection: Connection) -> None:
        """Read a message from `connection`: a nonce first, then a hello."""
        # Read the message. Its meaning depends on what this connection has sent before.
        guest = self._guests.get(connection)
        try:
            message = connection.read()
            if message is None:
                return
            if guest is None:
                raise ValueError("a node sent a message after it joined")
            if guest.greeted:
                self._admit(connection, Hello.parse(message))
            else:
                self._greet(guest, nonce(message))
        # Close the connection on any error. A reason is sent only to what looks like a node.
        except NotSigned as unsigned:
            self._refuse_unsigned(connection, unsigned)
        except ValueError as error:
            if guest is not None and guest.greeted:
                connection.send(
                    refused=f"node 0 does not understand this node ({error})",
                    code=ExitCode.WRONG_USE,
                )
            self._drop(connection)
        except OSError:
            self._drop(connection)

    def _greet(self, guest: _Guest, theirs: str) -> None:
        """Send a nonce of this node, after `theirs`. With a secret, sign all later messages."""
        own = secrets.token_hex(16)
        guest.connection.send(nonce=own)
        if self._node.secret is not None:
            guest.connection.sign(self._node.secret, (own, theirs), is_first=True)
        guest.greeted = True

    def _admit(self, connection: Connection, hello: Hello) -> None:
        """Let the node that has sent `hello` join, or refuse it."""
        name = _name(hello, connection)
        refusal = mismatch(self._node, hello, name)
        earlier = self.joined.get(hello.rank)
        if earlier is not None and refusal is None:
            refusal = taken_rank(earlier[0].name, earlier[1].host, hello, name)
        if refusal is not None:
            self._refuse(connection, refusal)
            return
        # The node was restarted. The end of its earlier connection may not have arrived yet.
        if earlier is not None:
            reason = f"{name} replaces {earlier[0].name}"
            self._log_once(reason)
            earlier[0].send(refused=f"{reason}: {OWN_RANK}", code=ExitCode.WRONG_USE)
            self._drop(earlier[0])
        connection.name = name
        del self._guests[connection]
        self.joined[hello.rank] = connection, hello

    def _refuse_unsigned(self, connection: Connection, unsigned: NotSigned) -> None:
        """Close `connection`, whose message is not signed with the secret of this node.

        Most often, one of the nodes was started without the secret, so a hello gets the reason.
        """
        try:
            hello = Hello.parse(unsigned.message)
        except ValueError:
            self._drop(connection)
            return
        name = _name(hello, connection)
        refusal = another_secret(self._node, hello, name, unsigned.signed)
        self._refuse(connection, refusal, plain=True)

    def _refuse(self, connection: Connection, refusal: Refusal, plain: bool = False) -> None:
        """Log and send `refusal`, and close `connection`. With `plain`, do not sign the message."""
        self._log_once(refusal.reason)
        connection.send(plain=plain, refused=refusal.reason, code=refusal.code)
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """Close `connection`, and forget its guest or its node."""
        self._selector.unregister(connection)
        connection.socket.close()
        self._guests.pop(connection, None)
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        """Remove the node that has joined by `connection`, if there is one."""
        self.joined = {
            rank: (other, hello)
            for rank, (other, hello) in self.joined.items()
            if other is not connection
        }

    def _log_once(self, text: str) -> None:
        """Log `text` once.

        The number of lines is limited, because a stranger can try as often as it wants.
        """
        if text not in self._logged and len(self._logged) < _MOST_COMPLAINTS:
            self._logged.add(text)
            self._log(text)


def _name(hello: Hello, connection: Connection) -> str:
    return f"node {hello.rank} ({hello.host}, {connection.name})"
