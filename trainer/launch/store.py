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
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub lacks it


def use_store(arguments: argparse.Namespace, address: str, port: int) -> None:
    """Set the address of the store of all ranks in torchrun's arguments.

    With the static rendezvous, each node knows its rank. torchrun would open a store on all
    interfaces, but it uses the store that this process has already opened.
    """
    arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_conf = "static", "", ""
    arguments.master_addr, arguments.master_port = address, port


def serve(listening: socket.socket) -> "TCPStore":
    """Return torch's network store on a socket that listens at an address of this machine.

    The store exists as long as the returned object. Without a socket, torch would listen on all
    interfaces.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub does not list it

    address, port, *_ = listening.getsockname()
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


def use_file_store(arguments: argparse.Namespace, folder: Path) -> None:
    """Use a file as the store of a single machine.

    torch's network store has no authentication and listens on all interfaces.
    """
    arguments.standalone = False
    arguments.rdzv_backend, arguments.rdzv_id = "c10d", "trainbox"
    arguments.rdzv_endpoint, arguments.rdzv_conf = str(folder / "agent"), "store_type=file"
    os.environ[Internal.STORE] = str(folder / "ranks")
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def use_loopback_store(arguments: argparse.Namespace) -> "TCPStore":
    """Open torch's network store for the ranks of a user's program, and return it.

    The program connects to MASTER_ADDR and MASTER_PORT. torchrun's own store would listen on all
    interfaces.
    """
    arguments.standalone, arguments.nnodes, arguments.node_rank = False, "1", 0
    listening = socket.create_server(("127.0.0.1", 0))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    use_store(arguments, *listening.getsockname())
    return serve(listening)


def have_met(keys: Iterable[str]) -> bool:
    """Return whether ranks have written to the store with `keys`, as a process group does.

    torchrun writes its own keys there.
    """
    return not all("torchelastic/" in key for key in keys)
