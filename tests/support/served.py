"""An HTTP server on the loopback for files that a task downloads."""

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `folder`; yield the URL, and the list of requested paths."""
    requested = list[str]()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def do_GET(self) -> None:
            requested.append(self.path)
            super().do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", requested
        server.shutdown()
        thread.join()
