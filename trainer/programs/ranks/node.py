"""Describe a node of a job, and limit the time that it waits for the other nodes."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainbox.errors import NetworkFailure, WrongUse

LOOK_EVERY_S = 1.0  # between two attempts, and the longest wait without a check of the time
_REPORT_EVERY_S = 10
# The remedy if a node cannot find the other nodes.
SAME_COMMAND = (
    "start the same command on each machine, with an --rdzv-endpoint that all machines can reach "
    "and that no other program uses"
)

Log = Callable[[str], None]


@dataclass(frozen=True)
class Node:
    """One of the `nnodes` machines of `job`, which starts `processes` ranks.

    The node looks for the other nodes at `endpoint` (`host:port`) for at most `timeout_s` seconds.
    With `await_name`, the host of the endpoint may become known later.
    """

    rank: int
    nnodes: int
    processes: int
    endpoint: str
    job: str
    timeout_s: int
    await_name: bool = False

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The host and the port of the endpoint."""
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)


class Deadline:
    """The limit on the time that a node waits, with a log line every 10 s."""

    def __init__(self, node: Node, log: Log) -> None:
        """Start the time of `node.timeout_s` seconds."""
        self._node, self._log, self._begin_s, self._reports = node, log, time.monotonic(), 0

    def check(self, missing: str, remark: str = "") -> None:
        """Log what is `missing`, if a line is due. Callers repeat this call while they wait.

        `remark` is added to the message.

        Raises:
            NetworkFailure: The time is up.
        """
        node, waited_s = self._node, time.monotonic() - self._begin_s
        remark = f" ({remark})" if remark else ""
        if waited_s >= node.timeout_s:
            raise NetworkFailure(
                f"waited {node.timeout_s} s for {missing} at "
                f"{node.endpoint}{remark}: {SAME_COMMAND}"
            )
        if waited_s >= (self._reports + 1) * _REPORT_EVERY_S:
            self._reports += 1
            waited_s = self._reports * _REPORT_EVERY_S
            self._log(
                f"waiting for {missing} at {node.endpoint}, {waited_s} s of "
                f"{node.timeout_s} s{remark}"
            )


def refuse_unknown_host(node: Node, error: socket.gaierror) -> None:
    """Raise WrongUse for an unknown host, unless its name may become known later."""
    if not node.await_name:
        raise WrongUse(
            f"--rdzv-endpoint {node.endpoint}: this machine cannot find the host "
            f"{node.host_and_port[0]} ({error.strerror}): write its address, as in "
            "192.168.1.10:29400"
        ) from error
