"""The other nodes' side of the rendezvous: connect to node 0 and wait for all nodes."""

import contextlib
import socket
import time

from trainbox.contract.errors import ExitCode, NetworkFailure, WrongUse
from trainer.launch.connection import Connection
from trainer.launch.meeting import Meeting
from trainer.launch.messages import Answer, Hello, Refusal
from trainer.launch.node import (
    LOOK_EVERY_S,
    SAME_COMMAND,
    Deadline,
    Log,
    Node,
    refuse_unknown_host,
)

_CONNECT_S = 5.0
_LONGEST_ANSWER = 2**20  # bytes; it has a number for each node


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
