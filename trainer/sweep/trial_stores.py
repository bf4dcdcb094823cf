"""The stores with which the scripts of trials make a process group, on the loopback interface.

A script finds the variables of torchrun, and torch's own store would listen on all interfaces.
"""

import os
import select
import socket
import subprocess
import sys
from contextlib import suppress

from trainbox.contract.processes import die_with_parent


class TrialStores:
    """Offers a store to each trial, one after the other.

    Most trials do not connect. So the process that serves the stores, and imports torch, starts
    with the first connection.
    """

    def __init__(self) -> None:
        self._offered: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def offer(self) -> int:
        """Listen for the next trial, and return the port."""
        self._withdraw()
        self._offered = socket.create_server(("127.0.0.1", 0))
        port: int = self._offered.getsockname()[1]
        return port

    def serve(self) -> None:
        """Serve the store if the trial has connected. Call this often; it never waits."""
        if self._offered is None or not select.select([self._offered], [], [], 0)[0]:
            return
        control = self._running_server()
        with suppress(OSError):  # the server was killed, and the trial fails with torch's message
            socket.send_fds(control, [b"."], [self._offered.fileno()])
        self._withdraw()

    def close(self) -> None:
        """End the server."""
        self._withdraw()
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            self._server.wait()

    def _withdraw(self) -> None:
        if self._offered is not None:
            self._offered.close()
            self._offered = None

    def _running_server(self) -> socket.socket:
        """Return the socket of the server, which is started if it does not run."""
        if self._control is not None and self._server is not None and self._server.poll() is None:
            return self._control
        if self._control is not None:
            self._control.close()
        self._control, its = socket.socketpair()
        with its:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainer.launch.store_server", str(its.fileno())],
                pass_fds=[its.fileno()],
                # torch would log the end of each script as a lost connection.
                env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
                stdin=subprocess.DEVNULL,
                # This process has no threads, so `preexec_fn` is safe.
                preexec_fn=die_with_parent,  # noqa: PLW1509
            )
        return self._control
