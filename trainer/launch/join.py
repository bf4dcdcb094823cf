"""The other nodes' side of the rendezvous: connect to node 0 and wait for all nodes."""

import contextlib
import secrets
import selectors
import socket
import time

from trainbox.contract.errors import ExitCode, NetworkFailure, WrongUse
from trainer.launch.connection import Connection, NotSigned
from trainer.launch.meeting import Meeting
from trainer.launch.messages import LONGEST_TEXT, Answer, Message, integer, nonce
from trainer.launch.node import (
    LOOK_EVERY_S,
    SAME_COMMAND,
    SAME_SECRET,
    Deadline,
    Log,
    Node,
    refuse_unknown_host,
)

_CONNECT_S = 5.0
_LONGEST_ANSWER, _LONGEST_REASON = 2**20, 1000


def join(node: Node, log: Log) -> Meeting:
    """Connect to node 0 until it lets this node join.

    Raises:
        WrongUse: The host is unknown, or node 0 refuses this node.
        NetworkFailure: Another program answers, the secrets differ, or the time is up.
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
        except NotSigned as error:
            raise NetworkFailure(
                f"the program at {node.endpoint} does not have this node's secret: {SAME_SECRET}"
            ) from error
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
        NotSigned: Node 0 does not have the secret of this node.
        ValueError: The answer is not from Trainbox.
        WrongUse: Node 0 refuses this node, because the nodes contradict each other.
        NetworkFailure: Node 0 belongs to another job, or the time is up.
    """
    with contextlib.ExitStack() as sockets, selectors.DefaultSelector() as selector:
        # Connect. From here on the selector limits each wait, and not the socket.
        opened = sockets.enter_context(
            socket.create_connection(node.host_and_port, timeout=_CONNECT_S)
        )
        opened.settimeout(None)
        connection = Connection(opened, f"node 0 ({node.host_and_port[0]})", _LONGEST_ANSWER)
        selector.register(connection, selectors.EVENT_READ)

        def receive(missing: str) -> Message:
            while True:
                deadline.check(missing)
                if selector.select(LOOK_EVERY_S) and (found := connection.read()) is not None:
                    return found

        # Exchange nonces. With a secret, both sides sign all messages from here on.
        own = secrets.token_hex(16)
        connection.send(nonce=own)
        theirs = nonce(receive("node 0"))
        if node.secret is not None:
            connection.sign(node.secret, (theirs, own), is_first=False)
        # Send the hello.
        connection.send(
            node_rank=node.rank,
            nnodes=node.nnodes,
            job=node.job,
            processes=node.processes,
            host=socket.gethostname()[:LONGEST_TEXT],
        )
        # Wait until all nodes have joined. An unsigned refusal is accepted too: it comes from a
        # node 0 without the secret, or from another program that uses its port.
        try:
            message = receive("the other nodes")
        except NotSigned as unsigned:
            message = unsigned.message
            if "refused" not in message:
                raise
        # Check the answer, and keep the connection open.
        _check_admitted(message)
        answer = Answer.parse(message, node.nnodes)
        own_count = answer.processes[node.rank]
        if own_count != node.processes:
            raise ValueError(f"processes has {own_count} for this node, which has {node.processes}")
        meeting = Meeting(
            opened.getpeername()[0], answer.store_port, None, answer.processes, (connection,)
        )
        sockets.pop_all()
        return meeting


def _check_admitted(message: Message) -> None:
    """Raise the failure with which node 0 has refused this node, if it has."""
    if "refused" in message:
        code = integer(message, "code", 0, 255)
        raise (WrongUse if code == ExitCode.WRONG_USE else NetworkFailure)(
            str(message["refused"])[:_LONGEST_REASON]
        )
