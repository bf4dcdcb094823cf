"""Node 0's side of the rendezvous: listen at the endpoint until all nodes have joined."""

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Collection

from trainbox.contract.errors import Failure, NetworkFailure, WrongUse
from trainer.launch.meeting import Meeting
from trainer.launch.node import LOOK_EVERY_S, Deadline, Log, Node, refuse_unknown_host
from trainer.launch.reception import Reception


def host(node: Node, log: Log) -> Meeting:
    """Let all other nodes join, and send them the port of the store.

    Raises:
        WrongUse: The host of the endpoint is unknown, or it is not this machine.
        NetworkFailure: The port of the endpoint is in use, or a node is missing after `timeout_s`.
    """
    # Listen. A loopback address is suspicious, but not refused: all nodes may be on this machine.
    deadline = Deadline(node, log)
    listener = _listen(node, deadline)
    address = listener.getsockname()[0]
    remark = ""
    if ipaddress.ip_address(address).is_loopback:
        remark = "an address that only this machine can reach"
        if node.await_name:
            log(
                f"the host of the endpoint, {node.host_and_port[0]}, is {address} on this "
                f"machine, {remark}: if the other nodes run on other machines, correct "
                "/etc/hosts, or set RDZV_ENDPOINT=ADDRESS:PORT on each"
            )
    with contextlib.ExitStack() as sockets, Reception(node, listener, log) as reception:
        # Let nodes join until none is missing.
        while missing := [rank for rank in range(1, node.nnodes) if rank not in reception.joined]:
            deadline.check(_names(missing), remark)
            reception.look()
        # Take the connections over, and open the port for torch's store. If anything fails, the
        # stack closes them. `pop_all` keeps them open.
        joined = [reception.joined[rank] for rank in range(1, node.nnodes)]
        connections = tuple(connection for connection, _ in joined)
        for connection in connections:
            sockets.push(reception.keep(connection))
        store = sockets.enter_context(socket.create_server((address, 0), family=listener.family))
        sockets.pop_all()
    # Send the answer for which all other nodes wait.
    port = store.getsockname()[1]
    processes = (node.processes, *(hello.processes for _, hello in joined))
    for connection in connections:
        connection.send(store_port=port, processes=processes)
    return Meeting(address, port, store, processes, connections)


def _listen(node: Node, deadline: Deadline) -> socket.socket:
    """Return a socket that listens only at the address of the endpoint.

    Raises:
        WrongUse: The host is unknown, or it is not the address of this machine.
        NetworkFailure: The port is in use, or the system refuses to listen.
    """
    name, port = node.host_and_port
    while True:
        # Look the host up. With `await_name`, an unknown name may become known.
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            refuse_unknown_host(node, error)
            deadline.check("the name of node 0", str(error.strerror))
            time.sleep(LOOK_EVERY_S)
            continue
        # Listen at the first of its addresses that works.
        for family, _, _, _, address in found:
            ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
            if ip.is_unspecified or ip.is_multicast:
                raise WrongUse(
                    f"--rdzv-endpoint {node.endpoint} is {ip}, which is not the address of "
                    "one machine: give the address by which the other nodes reach node 0"
                )
            try:
                return socket.create_server(address, family=family)
            except OSError as error:
                last = error
        # A restarted pod has a new address, and for a while its name may have the old one.
        is_name = name != found[0][4][0]
        where = f"{name} ({found[0][4][0]})" if is_name else name
        if not (node.await_name and is_name and last.errno == errno.EADDRNOTAVAIL):
            raise _cannot_listen(node, where, last)
        deadline.check("the address of node 0", f"{where} is not this machine's")
        time.sleep(LOOK_EVERY_S)


def _cannot_listen(node: Node, where: str, error: OSError) -> Failure:
    """Return the failure for `error`, which node 0 got when it tried to listen at `where`."""
    if error.errno == errno.EADDRNOTAVAIL:
        return WrongUse(
            f"{where} is not an address of this machine: use --node-rank 0 on the "
            "machine that --rdzv-endpoint names"
        )
    if error.errno == errno.EADDRINUSE:
        return NetworkFailure(
            f"port {node.host_and_port[1]} of {where} is in use by another program: set "
            "--rdzv-endpoint to another port, the same on each machine"
        )
    return NetworkFailure(
        f"node 0 cannot listen at {node.endpoint} ({error.strerror}): set --rdzv-endpoint "
        "to another port"
    )


def _names(ranks: Collection[int]) -> str:
    """Return `node 1` or `nodes 1, 2`."""
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
