"""Serve a WSGI application over HTTP, with few threads and connections.

`prometheus_client` has such a server for /metrics, without a limit and without other pages.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socket import SHUT_RDWR, socket
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

MOST_CONNECTIONS = 32  # each has a thread and a file
DEADLINE_S = 5.0  # from the connection to the end of the answer


@contextmanager
def served(host: str, port: int, application: WSGIApplication) -> Iterator[tuple[str, int]]:
    """Serve `application` during the body, which gets the host and the port.

    Port 0 is any free port.

    Raises:
        OSError: `host` is not an address of this machine, or the port is taken.
    """
    with _Server((host, port), _Handler) as server:
        server.set_app(application)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield host, server.server_port
        finally:
            server.shutdown()


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


class _Server(ThreadingMixIn, WSGIServer):
    """A server that ends a connection at its deadline, and the oldest one for a new one."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        self._begin_s: dict[socket, float] = {}  # of each open connection, the oldest first
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            for oldest in list(self._begin_s)[:1]:
                _end(oldest)
            # Its thread closes it. So the limit is never exceeded.
            self._free.acquire()
        self._begin_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        del self._begin_s[request]
        self._free.release()

    def service_actions(self) -> None:
        for connection, begin_s in list(self._begin_s.items()):
            if time.monotonic() > begin_s + DEADLINE_S:
                _end(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that closes its connection is not an error of the server.
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _end(connection: socket) -> None:
    """Let the thread of the connection read its end, and fail to write."""
    with suppress(OSError):
        connection.shutdown(SHUT_RDWR)
