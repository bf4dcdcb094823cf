"""Serve a store to each trial of one worker of a sweep, one after the other.

`python -P -m trainer.launch.store_server N` receives listening sockets through the Unix socket N.
"""

import signal
import socket
import sys

from trainer.launch.store import serve
from trainer.system.signals import STOP_SIGNALS


def main(control: socket.socket) -> None:
    """Serve the sockets until the other end of `control` is closed."""
    for number in STOP_SIGNALS:  # a scheduler sends them to all processes, and scripts still save
        signal.signal(number, signal.SIG_IGN)
    store = None
    while received := socket.recv_fds(control, 1, 1)[1]:
        del store  # that of the trial before
        listening = socket.socket(fileno=received[0])
        store = serve(listening, *listening.getsockname())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
