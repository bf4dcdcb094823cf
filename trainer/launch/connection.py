"""A connection between two nodes, which exchange JSON objects, each on one line."""

import contextlib
import errno
import json
import socket
import sys

from trainer.launch.messages import Message

# A machine that does not answer for this long is lost. A switch that restarts takes half of it.
_SILENT_S = 60
_PROBE_EVERY_S = 10


class Connection:
    """One end of a connection. A message of more than `longest` bytes is refused."""

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
        try:
            message = json.loads(line)
        except RecursionError as error:
            raise ValueError("not a message") from error
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def send(self, message: Message) -> None:
        """Send `message`, or nothing if the other end has closed the connection."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")
