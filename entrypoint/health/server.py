"""Serve short pages over HTTP from one thread, with a deadline for each request.

A thread for each request would let slow clients use up the threads. Here a slow client costs an
open connection, and the oldest connection is closed if there are too many.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

DEADLINE_S = 5.0  # from the connection to the end of the answer
MOST_CONNECTIONS = 512
_BACKLOG = 128  # connections that wait to be accepted
_LONGEST_REQUEST = 2**14  # bytes


@dataclass(frozen=True)
class Page:
    """The answer to a request, such as `Page("200 OK", "text/plain", b"...")`."""

    status: str
    content_type: str
    body: bytes


Pages = Callable[[str, Mapping[str, str]], Page]  # from a path and headers with lower-case names


@contextmanager
def served(host: str, port: int, pages: Pages) -> Iterator[tuple[str, int]]:
    """Serve `pages` during the body, which gets the host and the port. Port 0 is any free port.

    Raises:
        OSError: `host` is not an address of this machine, or the port is taken.
    """
    with socket.create_server((host, port), backlog=_BACKLOG) as listening:
        address = listening.getsockname()[:2]
        with asyncio.Runner() as runner:
            loop, stop = runner.get_loop(), asyncio.Event()
            thread = threading.Thread(
                target=runner.run, args=(_serve(listening, pages, stop),), daemon=True
            )
            thread.start()
            try:
                yield address
            finally:
                loop.call_soon_threadsafe(stop.set)
                thread.join()


async def _serve(listening: socket.socket, pages: Pages, stop: asyncio.Event) -> None:
    """Answer requests until `stop` is set."""
    clients: dict[_Client, asyncio.Transport] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Client(pages, clients), sock=listening, backlog=_BACKLOG
    )
    await stop.wait()
    server.close()
    for transport in clients.values():
        transport.abort()
    await server.wait_closed()


class _Client(asyncio.Protocol):
    """A connection, which has one request. `clients` has all open ones, the oldest first."""

    def __init__(self, pages: Pages, clients: "dict[_Client, asyncio.Transport]") -> None:
        self._pages, self._clients, self._received = pages, clients, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self._clients) >= MOST_CONNECTIONS:
            self._clients.pop(next(iter(self._clients))).abort()
        self._clients[self] = self._transport
        self._deadline = asyncio.get_running_loop().call_later(DEADLINE_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._received += data
        request, end, _ = self._received.partition(b"\r\n\r\n")
        if end:
            self._transport.write(_answer(request.decode("latin-1"), self._pages))
            self._transport.close()
        elif len(self._received) > _LONGEST_REQUEST:
            self._transport.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._deadline.cancel()
        self._clients.pop(self, None)


def _answer(request: str, pages: Pages) -> bytes:
    """Return the whole answer to the lines of a request."""
    first, *lines = request.split("\r\n")
    method, _, target = first.partition(" ")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    if method in ("GET", "HEAD"):
        page = pages(target.partition(" ")[0].partition("?")[0], headers)
    else:
        page = Page("405 Method Not Allowed", "text/plain; charset=utf-8", b"use GET\n")
    head = (
        f"HTTP/1.1 {page.status}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else page.body)
