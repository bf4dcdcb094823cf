"""The connection between two nodes, and the messages that nodes send to each other.

Each node sends a hello to node 0. Node 0 refuses it, or it sends the answer when all nodes have
joined. After that, each node reports its end. Another program may send anything, so the types of
all values are checked.
"""

import contextlib
import errno
import json
import socket
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainbox.errors import UNSAVED, ExitCode
from trainbox.files.parsing import parse_object

# A machine that does not answer for this long is lost. A switch that restarts takes half of it.
_SILENT_S = 60
_PROBE_EVERY_S = 10

Message = Mapping[str, Any]


class Hello(NamedTuple):
    """The message with which a node asks node 0 to let it join."""

    rank: int
    nnodes: int
    processes: int
    job: str
    host: str

    @classmethod
    def parse(cls, message: Message) -> "Hello":
        """Return the hello in `message`.

        Raises:
            ValueError: A value is missing or has another type, or no node has this rank.
        """
        hello = cls(
            **{name: _value(message, name, kind) for name, kind in cls.__annotations__.items()}
        )
        if not 0 < hello.rank < hello.nnodes or hello.processes < 1:
            raise ValueError("a number is out of range")
        return hello


class Refusal(NamedTuple):
    """Why a node may not join, and the exit code that it should use."""

    refused: str
    code: int


class Answer(NamedTuple):
    """The answer of node 0 after all nodes have joined: the port of the store, and all ranks."""

    store_port: int
    processes: tuple[int, ...]  # the number of ranks of each node

    @classmethod
    def parse(cls, message: Message, nnodes: int) -> "Answer | Refusal":
        """Return the answer to one of `nnodes` nodes.

        Raises:
            ValueError: A value is missing or has another type.
        """
        if "refused" in message:
            return Refusal(_value(message, "refused", str), _value(message, "code", int))
        counts = _value(message, "processes", list)
        if len(counts) != nnodes or not all(type(count) is int for count in counts):
            raise ValueError(f"processes is not a list of {nnodes} numbers")
        return cls(_value(message, "store_port", int), tuple(counts))


class End(NamedTuple):
    """A description of another node's end, and the exit code for this node."""

    what: str
    code: int

    @classmethod
    def parse(cls, message: Message, name: str) -> "End":
        """Return the end in a message of the node `name`.

        If the other node succeeded (0) or was stopped (75 or 143), this node exits with the same
        code, and otherwise with 7.

        Raises:
            ValueError: The message does not report an end.
        """
        if "lost" in message:
            return cls(_value(message, "lost", str), ExitCode.NETWORK)
        code = _value(message, "ended", int)
        is_shared = code in (ExitCode.SUCCESS, ExitCode.PREEMPTED, UNSAVED)
        return cls(f"{name} exited with code {code}", code if is_shared else ExitCode.NETWORK)


def _value(message: Message, name: str, kind: type) -> Any:
    """Return the value `name` of `message`.

    Raises:
        ValueError: The value is missing or of another type.
    """
    value = message.get(name)
    if type(value) is not kind:  # bool is a subclass of int
        raise ValueError(f"{name} is not of type {kind.__name__}")
    return value


class Connection:
    """One end of a connection, which exchanges JSON objects, each on one line.

    A message of more than `longest` bytes is refused.
    """

    def __init__(self, connected: socket.socket, name: str, longest: int = 4096) -> None:
        """Use the socket `connected`, and call the other end `name`."""
        self.socket, self.name, self._longest = connected, name, longest
        self._received_part = b""
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for option, value in (
                (socket.TCP_KEEPIDLE, _PROBE_EVERY_S),
                (socket.TCP_KEEPINTVL, _PROBE_EVERY_S),
                (socket.TCP_KEEPCNT, _SILENT_S // _PROBE_EVERY_S - 1),
                (socket.TCP_USER_TIMEOUT, _SILENT_S * 1000),
            ):
                connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self.socket.fileno()

    def read(self) -> Message | None:
        """Return the next message, or None if it is not complete yet.

        Bytes after the message stay in the socket.

        Raises:
            OSError: The other end has closed the connection.
            ValueError: The bytes are not a message.
        """
        arrived = self.socket.recv(self._longest, socket.MSG_PEEK)
        if not arrived:
            raise ConnectionResetError(errno.ECONNRESET, "its connection was closed")
        self._received_part += self.socket.recv(arrived.find(b"\n") + 1 or len(arrived))
        if len(self._received_part) > self._longest:
            raise ValueError("not a message")
        if not self._received_part.endswith(b"\n"):
            return None
        line, self._received_part = self._received_part, b""
        return parse_object(line)

    def send(self, message: Message) -> None:
        """Send `message`, or nothing if the other end has closed the connection."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")
