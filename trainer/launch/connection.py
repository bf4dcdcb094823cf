"""A connection between two nodes: each message is a JSON object on a line of its own, signed where
there is a secret.
"""

import contextlib
import errno
import hmac
import json
import socket
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

# A machine that has not answered for this long is lost; a switch that starts anew takes half of it.
_SILENT_S = 60
_PROBE_EVERY_S = 10
_LONGEST_LINE = 4096
_MAC_LENGTH = 64


class NotSigned(ValueError):
    """A message whose signature is missing, wrong or not expected; `message` is what it claims."""

    def __init__(self, message: Mapping[str, Any], signed: bool) -> None:
        super().__init__("its message is not signed with the secret of this node")
        self.message, self.signed = message, signed


class Line:
    """One end of the connection. A message of more than `longest` bytes is not read."""

    host = ""  # the other machine's own name, once it has said it

    def __init__(self, connection: socket.socket, name: str, longest: int = _LONGEST_LINE) -> None:
        self.connection, self.name, self._longest, self._begun = connection, name, longest, b""
        self._key: bytes | None = None
        self._is_first = False
        self._sent = self._received = 0
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for option, value in (
                (socket.TCP_KEEPIDLE, _PROBE_EVERY_S),
                (socket.TCP_KEEPINTVL, _PROBE_EVERY_S),
                (socket.TCP_KEEPCNT, _SILENT_S // _PROBE_EVERY_S - 1),
                (socket.TCP_USER_TIMEOUT, _SILENT_S * 1000),
            ):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self.connection.fileno()

    def sign(self, secret: bytes, nonces: tuple[str, str], is_first: bool) -> None:
        """Sign each message from now on, and refuse what the other end has not signed.

        `nonces` are node 0's and the other node's, new for each connection, and the count of
        messages is signed as well: nothing that was recorded can be sent again, in either
        direction.
        """
        self._key = hmac.digest(
            secret, f"trainbox rendezvous {' '.join(nonces)}".encode(), "sha256"
        )
        self._is_first = is_first
        self._sent = self._received = 0

    def read(self) -> Mapping[str, Any] | None:
        """Return the next message, or None if it is not whole yet; what comes after it stays in the
        connection.

        Raises:
            OSError: the other end is gone.
            NotSigned: the message is not from a node that knows the secret.
            ValueError: it is not a message.
        """
        arrived = self.connection.recv(self._longest, socket.MSG_PEEK)
        if not arrived:
            raise ConnectionResetError(errno.ECONNRESET, "its connection was closed")
        self._begun += self.connection.recv(arrived.find(b"\n") + 1 or len(arrived))
        if len(self._begun) > self._longest:
            raise ValueError("not a message")
        if not self._begun.endswith(b"\n"):
            return None
        line, self._begun = self._begun[:-1], b""
        signed = not line.startswith(b"{")
        mac, body = (line[:_MAC_LENGTH], line[_MAC_LENGTH + 1 :]) if signed else (b"", line)
        try:
            message = json.loads(body, parse_constant=_refuse)
        except RecursionError as error:
            raise ValueError("not a message") from error
        if not isinstance(message, dict):
            raise ValueError("not a message")
        if self._key is None and not signed:
            return message
        if self._key is None or not hmac.compare_digest(
            mac, self._mac(not self._is_first, self._received, body)
        ):
            raise NotSigned(message, signed)
        self._received += 1
        return message

    def send(self, *, plain: bool = False, **message: Any) -> None:
        """Send the message, with `plain` unsigned; an end that is gone does not receive it."""
        line = json.dumps(message).encode()
        if self._key is not None and not plain:
            line = self._mac(self._is_first, self._sent, line) + b" " + line
            self._sent += 1
        with contextlib.suppress(OSError):
            self.connection.sendall(line + b"\n")

    def _mac(self, from_first: bool, count: int, body: bytes) -> bytes:
        assert self._key is not None
        return (
            hmac.new(self._key, f"{int(from_first)} {count} ".encode() + body, "sha256")
            .hexdigest()
            .encode()
        )


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")
