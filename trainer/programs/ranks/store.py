"""The store through which the ranks of a launch meet, and torchrun's rendezvous with it.

It imports torch, so `torchrun.py` imports it when its signal handlers are installed.
"""

import argparse
import os
import socket
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]  # its stub lacks them
    HashStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from trainbox.processes.environment import Internal

_TIMEOUT = timedelta(minutes=15)  # as in torchrun's own rendezvous
_BACKEND = "trainbox"


class _KnownNodes(RendezvousHandler):
    """Nodes that have met already, and share a `store` at the address and port `where`.

    The ranks connect to the store, and so does torchrun if `store` is None. Without `where`, only
    torchrun uses the store, and the ranks have another one.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        store: Store | None,
        where: tuple[str, int] | None,
    ) -> None:
        self._job, self._node_rank = str(arguments.rdzv_id), int(arguments.node_rank)
        self._nnodes = int(arguments.nnodes)
        self._store, self._where = store, where

    @property
    def use_agent_store(self) -> bool:
        return self._where is not None

    def get_backend(self) -> str:
        return _BACKEND

    def get_run_id(self) -> str:
        return self._job

    def next_rendezvous(self) -> RendezvousInfo:
        if self._where is not None:
            store = self._store or TCPStore(*self._where, timeout=_TIMEOUT)
            info = RendezvousStoreInfo(*self._where)
        else:
            assert self._store is not None
            store = self._store
            # MASTER_PORT is a free port, for a task that needs one.
            info = RendezvousStoreInfo.build(self._node_rank, store, "127.0.0.1")
        return RendezvousInfo(store, self._node_rank, self._nnodes, info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def use_store(
    arguments: argparse.Namespace, store: Store | None, where: tuple[str, int] | None
) -> None:
    """Make torchrun use this store. Its own rendezvous would open one on all interfaces.

    Ranks connect to it at the address and port `where`, unless this is None. Without a `store`,
    torchrun connects to it as well, when it begins. The store is open until this process ends.
    """
    nodes = _KnownNodes(arguments, store, where)
    rendezvous_handler_registry.register(_BACKEND, lambda _: nodes)
    arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_conf = _BACKEND, "", ""


def serve(listening: socket.socket) -> TCPStore:
    """Return torch's network store on a socket that listens at an address of this machine.

    Without a socket, torch would listen on all interfaces.
    """
    address, port, *_ = listening.getsockname()
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def use_file_store(arguments: argparse.Namespace, folder: Path) -> None:
    """Use a file as the store of the ranks of a single machine.

    torch's network store has no authentication.
    """
    _use_one_machine(arguments)
    use_store(arguments, HashStore(), None)
    os.environ[Internal.STORE] = str(folder / "ranks")


def use_loopback_store(arguments: argparse.Namespace) -> TCPStore:
    """Open torch's network store for the ranks of a user's program, and return it.

    The program connects to MASTER_ADDR and MASTER_PORT.
    """
    _use_one_machine(arguments)
    listening = socket.create_server(("127.0.0.1", 0))
    where = listening.getsockname()
    use_store(arguments, store := serve(listening), where)
    return store


def _use_one_machine(arguments: argparse.Namespace) -> None:
    arguments.standalone, arguments.nnodes, arguments.node_rank = False, "1", 0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def have_met(keys: Iterable[str]) -> bool:
    """Return whether ranks have written to the store with `keys`, as a process group does.

    torchrun writes its own keys there.
    """
    return not all("torchelastic/" in key for key in keys)
