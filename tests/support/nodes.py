"""Nodes that meet on loopback."""

import contextlib
import queue
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trainer.programs.ranks import node as node_module
from trainer.programs.ranks.meeting import Meeting
from trainer.programs.ranks.node import Node
from trainer.programs.ranks.rendezvous import meet


def free_port() -> int:
    """Return a port on which no program listens, and which no other program can get.

    Servers that allow to reuse an address, such as Trainbox's and torch's, can listen on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = int(held.getsockname()[1])
    if sys.platform == "linux":  # elsewhere, nobody could listen beside a socket that is bound
        held.detach()  # open until this process ends
    held.close()
    return port


def node_of(rank: int, port: int, nnodes: int = 2, **other: Any) -> Node:
    """Return the node `rank`, which has `rank + 1` processes; `other` are fields of `Node`."""
    fields = {
        "processes": rank + 1,
        "endpoint": f"127.0.0.1:{port}",
        "job": "j",
        "timeout_s": 120,
    }
    return Node(rank, nnodes, **fields | other)


class Party:
    """Nodes in this process, each on a thread."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._pool = stack.enter_context(ThreadPoolExecutor(8))
        self.said = queue.Queue[str]()

    def start(self, node: Node, say: Callable[[str], None] | None = None) -> Callable[[], Meeting]:
        """Start the rendezvous of a node; the returned function waits for the result."""
        met = self._pool.submit(meet, node, say or self.said.put)

        def result() -> Meeting:
            answer = met.result(120)
            for opened in [connection.socket for connection in answer.connections] + (
                [answer.store] if answer.store else []
            ):
                self._stack.callback(opened.close)
            return answer

        return result

    def hear(self) -> str:
        """Return the next message that a node has printed."""
        return self.said.get()


@pytest.fixture
def party() -> Iterator[Party]:
    with contextlib.ExitStack() as stack:
        yield Party(stack)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report each second, instead of each 10 s, which nodes are missing."""
    monkeypatch.setattr(node_module, "_REPORT_EVERY_S", 1)
