"""A connection between two nodes, which exchange JSON objects.

Each message is one line of text. If the job has a secret, each message is signed.
"""

import contextlib
import errno
import hmac
import json
import socket
import sys
from typing import Any, NoReturn

from trainer.launch.messages import Message

# A machine that does not answer for this long is lost. A switch that restarts takes half of it.
_SILENT_S = 60
_PROBE_EVERY_S = 10
_LONGEST_MESSAGE = 4096
_MAC_LENGTH = 64


class NotSigned(ValueError):
    """A message whose signature is missing, wrong or unexpected.

    `message` is the unverified content, and `signed` is whether there is a signature.
    """

    def __init__(self, message: Message, signed: bool) -> None:
        super().__init__("its message is not signed with the secret of this node")
        self.message, self.signed = message, signed


class Connection:
    """One end of a connection. A message of more than `longest` bytes is refused."""

    def __init__(
        self, connected: socket.socket, name: str, longest: int = _LONGEST_MESSAGE
    ) -> None:
        """Use the socket `connected`, and call the other end `name`."""
        self.socket, self.name, self._longest = connected, name, longest
        self._received_part = b""
        self._key: bytes | None = None
        self._is_first = False
        self._sent_count = self._received_count = 0
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

    def sign(self, secret: bytes, nonces: tuple[str, str], is_first: bool) -> None:
        """Sign each message from now on, and refuse messages that the other end has not signed.

        `nonces` are those of node 0 and of the other node, and `is_first` is whether this end is
        node 0. The nonces are new for each connection, and each signature covers the direction and
        the count of messages. So no recorded message is accepted again.
        """
        self._key = hmac.digest(
            secret, f"trainbox rendezvous {' '.join(nonces)}".encode(), "sha256"
        )
        self._is_first = is_first
        self._sent_count = self._received_count = 0

    def read(self) -> Message | None:
        """Return the next message, or None if it is not complete yet.

        Bytes after the message stay in the socket.

        Raises:
            OSError: The other end has closed the connection.
            NotSigned: The message is not signed with the secret.
            ValueError: The bytes are not a message.
        """
        # Take bytes up to the end of the message.
        arrived = self.socket.recv(self._longest, socket.MSG_PEEK)
        if not arrived:
            raise ConnectionResetError(errno.ECONNRESET, "its connection was closed")
        self._received_part += self.socket.recv(arrived.find(b"\n") + 1 or len(arrived))
        if len(self._received_part) > self._longest:
            raise ValueError("not a message")
        if not self._received_part.endswith(b"\n"):
            return None
        line, self._received_part = self._received_part[:-1], b""
        # Parse the message. A signature, if there is one, is in front of it.
        signed = not line.startswith(b"{")
        mac, body = (line[:_MAC_LENGTH], line[_MAC_LENGTH + 1 :]) if signed else (b"", line)
        try:
            message = json.loads(body, parse_constant=_refuse)
        except RecursionError as error:
            raise ValueError("not a message") from error
        if not isinstance(message, dict):
            raise ValueError("not a message")
        # Verify the signature.
        if self._key is None and not signed:
            return message
        if self._key is None or not hmac.compare_digest(
            mac, self._mac(not self._is_first, self._received_count, body)
        ):
            raise NotSigned(message, signed)
        self._received_count += 1
        return message

    def send(self, *, plain: bool = False, **message: Any) -> None:
        """Send the message, without a signature if `plain`.

        If the other end has closed the connection, nothing is sent, and no error is raised.
        """
        line = json.dumps(message).encode()
        if self._key is not None and not plain:
            line = self._mac(self._is_first, self._sent_count, line) + b" " + line
            self._sent_count += 1
        with contextlib.suppress(OSError):
            self.socket.sendall(line + b"\n")

    def _mac(self, from_first: bool, count: int, body: bytes) -> bytes:
        """Return the signature of the message `body`, which is number `count` in its direction."""
        assert self._key is not None
        return (
            hmac.new(self._key, f"{int(from_first)} {count} ".encode() + body, "sha256")
            .hexdigest()
            .encode()
        )


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")
