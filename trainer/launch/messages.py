"""Check the messages that nodes send to each other.

Another program may send anything, so the type and the range of each value are checked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainbox.contract.errors import ExitCode
from trainbox.contract.options import MOST_PROCESSES

_MOST_NODES = 65536
LONGEST_TEXT = 256

Message = Mapping[str, Any]


def integer(message: Message, name: str, low: int, high: int) -> int:
    """Return the integer `name` of `message`.

    Raises:
        ValueError: The value is not an integer from `low` to `high`.
    """
    value = message.get(name)
    if type(value) is not int or not low <= value <= high:  # bool is a subclass of int
        raise ValueError(
            f"{name} is {str(value)[:LONGEST_TEXT]!r}, not an integer from {low} to {high}"
        )
    return value


def text(message: Message, name: str) -> str:
    """Return the text `name` of `message`.

    Raises:
        ValueError: The value is not a text, or it is empty or too long.
    """
    value = message.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_TEXT:
        raise ValueError(f"{name} is not a string of 1 to {LONGEST_TEXT} characters")
    return value


def nonce(message: Message) -> str:
    """Return the nonce of `message`.

    Raises:
        ValueError: The nonce is not 32 hexadecimal digits.
    """
    value = text(message, "nonce")
    if not re.fullmatch("[0-9a-f]{32}", value):
        raise ValueError("nonce is not 32 hex digits")
    return value


@dataclass(frozen=True)
class Hello:
    """The message with which a node asks node 0 to let it join."""

    rank: int
    nnodes: int
    processes: int
    job: str
    host: str

    @classmethod
    def parse(cls, message: Message) -> "Hello":
        """Return the hello in `message`.

        Raises:
            ValueError: A field is missing, has another type or is out of range.
        """
        nnodes = integer(message, "nnodes", 2, _MOST_NODES)
        rank = integer(message, "node_rank", 1, nnodes - 1)
        processes = integer(message, "processes", 1, MOST_PROCESSES)
        return cls(rank, nnodes, processes, text(message, "job"), text(message, "host"))


class Answer(NamedTuple):
    """The answer of node 0 after all nodes have joined."""

    store_port: int
    processes: tuple[int, ...]  # the number of ranks of each node

    @classmethod
    def parse(cls, message: Message, nnodes: int) -> "Answer":
        """Return the answer to one of `nnodes` nodes.

        Raises:
            ValueError: A field is missing, has another type or is out of range.
        """
        counts = message.get("processes")
        if not isinstance(counts, list) or len(counts) != nnodes:
            raise ValueError(f"processes is not a list of {nnodes}")
        processes = tuple(
            integer({"processes": count}, "processes", 1, MOST_PROCESSES) for count in counts
        )
        return cls(integer(message, "store_port", 1, 65535), processes)


class End(NamedTuple):
    """A description of another node's end, and the exit code for this node."""

    what: str
    code: int

    @classmethod
    def parse(cls, message: Message, name: str) -> "End":
        """Return the end in a message of the node `name`.

        If the other node succeeded (0) or was stopped (75), this node exits with the same code, and
        otherwise with 7.

        Raises:
            ValueError: The message does not report an end.
        """
        if "lost" in message:
            return cls(text(message, "lost"), ExitCode.NETWORK)
        code = integer(message, "ended", 0, 255)
        is_shared = code in (ExitCode.SUCCESS, ExitCode.PREEMPTED)
        return cls(f"{name} exited with code {code}", code if is_shared else ExitCode.NETWORK)
