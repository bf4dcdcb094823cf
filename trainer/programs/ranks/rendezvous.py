"""Connect the nodes of a job.

Node 0 listens at the endpoint until all other nodes have joined, and then sends the port of torch's
store to each of them. The reasons are in docs/decisions/0012-nodes-meet-on-one-interface.md.
"""

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Collection

from trainbox.errors import ExitCode, Failure, NetworkFailure, WrongUse
from trainer.programs.ranks.meeting import Meeting
from trainer.programs.ranks.messages import Answer, Connection, Hello, Refusal
from trainer.programs.ranks.node import (
    LOOK_EVERY_S,
    SAME_COMMAND,
    Deadline,
    Log,
    Node,
    refuse_unknown_host,
)
from trainer.programs.ranks.reception import Reception

_CONNECT_S = 5.0
_LONGEST_ANSWER = 2**20  # bytes; it has a number for each node


def meet(node: Node, log: Log) -> Meeting:
    """Wait until all nodes are connected, and log every 10 s which nodes are missing.

    Raises:
        WrongUse: The host of the endpoint is unknown, or on node 0 it is not this machine. Or the
            nodes contradict each other.
        NetworkFailure: The port of the endpoint is in use, or a node is missing after `timeout_s`.
    """
    return host(node, log) if node.rank == 0 else join(node, log)


def host(node: Node, log: Log) -> Meeting:
    """Let all other nodes join node 0, and send them the port of the store."""
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
    with Reception(node, listener, log) as reception:
        # Let nodes join until none is missing.
        while missing := [rank for rank in range(1, node.nnodes) if rank not in reception.joined]:
            deadline.check(_names(missing), remark)
            reception.look()
        # Open the port for torch's store, and take the connections over.
        store = socket.create_server((address, 0), family=listener.family)
        joined = reception.take()
    # Send the answer for which all other nodes wait.
    port = store.getsockname()[1]
    answer = Answer(port, (node.processes, *(hello.processes for _, hello in joined)))
    connections = tuple(connection for connection, _ in joined)
    for connection in connections:
        connection.send(answer._asdict())
    return Meeting(address, port, store, answer.processes, connections)


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


# ---- The other nodes ----


def join(node: Node, log: Log) -> Meeting:
    """Connect to node 0 until it lets this node join.

    Raises:
        WrongUse: The host is unknown, or node 0 refuses this node.
        NetworkFailure: Another program answers, or the time is up.
    """
    deadline = Deadline(node, log)
    while True:
        try:
            return _ask(node, deadline)
        except socket.gaierror as error:
            refuse_unknown_host(node, error)
            remark = str(error.strerror)
        except OSError as error:  # node 0 has not started yet, or it restarts
            remark = error.strerror or str(error)
        except ValueError as error:
            raise NetworkFailure(
                f"a program other than Trainbox answers at {node.endpoint}: {SAME_COMMAND}"
            ) from error
        deadline.check("node 0", remark)
        time.sleep(LOOK_EVERY_S)


def _ask(node: Node, deadline: Deadline) -> Meeting:
    """Ask node 0 to let this node join, and wait for the answer that all nodes have joined.

    Raises:
        OSError: The connection fails, and the caller tries again.
        ValueError: The answer is not from Trainbox.
        WrongUse: Node 0 refuses this node, because the nodes contradict each other.
        NetworkFailure: Node 0 belongs to another job, or the time is up.
    """
    with contextlib.ExitStack() as sockets:
        opened = sockets.enter_context(
            socket.create_connection(node.host_and_port, timeout=_CONNECT_S)
        )
        connection = Connection(opened, f"node 0 ({node.host_and_port[0]})", _LONGEST_ANSWER)
        own = Hello(node.rank, node.nnodes, node.processes, node.job, socket.gethostname())
        connection.send(own._asdict())
        # Wait until all nodes have joined.
        opened.settimeout(LOOK_EVERY_S)
        message = None
        while message is None:
            deadline.check("the other nodes")
            with contextlib.suppress(TimeoutError):
                message = connection.read()
        opened.settimeout(None)
        # Check the answer, and keep the connection open.
        answer = Answer.parse(message, node.nnodes)
        if isinstance(answer, Refusal):
            failure = WrongUse if answer.code == ExitCode.WRONG_USE else NetworkFailure
            raise failure(answer.refused)
        meeting = Meeting(
            opened.getpeername()[0], answer.store_port, None, answer.processes, (connection,)
        )
        sockets.pop_all()
        return meeting
