"""The store through which the ranks of a launch meet."""

import argparse
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from trainbox.contract.internal import Internal

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # its stub lacks it


def use_store(
    arguments: argparse.Namespace, store: "Store | None", where: tuple[str, int] | None
) -> None:
    """Make torchrun use this store, instead of a rendezvous of its own.

    Ranks connect to it at the address and port `where`, unless this is None. Without a `store`,
    torchrun connects to it as well, when it begins. The store is open until this process ends.
    """
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from trainer.launch.known_nodes import KnownNodes

    job, node_rank, nnodes = arguments.rdzv_id, arguments.node_rank, int(arguments.nnodes)
    nodes = KnownNodes(job, node_rank, nnodes, store, where)
    rendezvous_handler_registry.register(nodes.get_backend(), lambda _: nodes)
    arguments.rdzv_backend = nodes.get_backend()
    arguments.rdzv_endpoint = arguments.rdzv_conf = ""


def serve(listening: socket.socket) -> "TCPStore":
    """Return torch's network store on a socket that listens at an address of this machine.

    Without a socket, torch would listen on all interfaces.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub lacks it

    from trainer.launch.known_nodes import STORE_TIMEOUT

    address, port, *_ = listening.getsockname()
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def use_file_store(arguments: argparse.Namespace, folder: Path) -> None:
    """Use a file as the store of the ranks of a single machine.

    torch's network store has no authentication.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # its stub lacks it

    _use_one_machine(arguments)
    use_store(arguments, HashStore(), None)
    os.environ[Internal.STORE] = str(folder / "ranks")


def use_loopback_store(arguments: argparse.Namespace) -> "TCPStore":
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
