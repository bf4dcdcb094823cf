"""Decide which nodes may join a job. Nothing here reads or sends a message."""

from dataclasses import dataclass

from trainbox.contract.errors import ExitCode
from trainer.launch.messages import Hello
from trainer.launch.node import SAME_SECRET, Node

OWN_RANK = "give each machine a --node-rank of its own"


@dataclass(frozen=True)
class Refusal:
    """Why a node may not join, and the exit code that it should use."""

    reason: str
    code: int


def mismatch(node: Node, hello: Hello, name: str) -> Refusal | None:
    """Return the refusal of the node `name`, if it has another job or number of nodes than `node`.

    The exit code for another job is 7. Its scheduler may try again, when the port is free.
    """
    if hello.job != node.job:
        return Refusal(
            f"{name} is of job {hello.job}, but job {node.job} uses {node.endpoint}: give each job "
            "an endpoint of its own",
            ExitCode.NETWORK,
        )
    if hello.nnodes != node.nnodes:
        return Refusal(
            f"{name} was started for {hello.nnodes} nodes, but node 0 for {node.nnodes}: "
            "set --nnodes to the same number on each node",
            ExitCode.WRONG_USE,
        )
    return None


def another_secret(node: Node, hello: Hello, name: str, signed: bool) -> Refusal:
    """Return the refusal of the node `name`, whose hello has a wrong signature or none."""
    if found := mismatch(node, hello, name):
        return found
    if node.secret is None:
        reason = f"{name} has a secret, but node 0 does not have one"
    elif signed:
        reason = f"{name} has a different secret than node 0"
    else:
        reason = f"{name} does not have a secret, but node 0 has one"
    return Refusal(f"{reason}: {SAME_SECRET}", ExitCode.WRONG_USE)


def taken_rank(joined_name: str, joined_host: str, hello: Hello, name: str) -> Refusal | None:
    """Return the refusal of the node `name`, if another machine has joined with its rank.

    A node that was restarted on the same machine may join again.
    """
    if joined_host == hello.host:
        return None
    return Refusal(f"{joined_name} and {name} have the same rank: {OWN_RANK}", ExitCode.WRONG_USE)
