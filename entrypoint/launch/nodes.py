"""The nodes of a job, and the address at which they meet. Pure."""

import ipaddress
import re
from dataclasses import dataclass

from entrypoint.launch.cluster import DEFAULT_PORT, Cluster
from entrypoint.launch.request import LaunchRequest
from trainbox.contract.errors import WrongUse


@dataclass(frozen=True)
class Nodes:
    """The nodes of the training. With one node, `rank` is 0 and `endpoint` is empty."""

    count: int
    rank: int
    endpoint: str
    job_id: str
    # Under a scheduler, the endpoint's name may become known only later. Elsewhere, an unknown name
    # is an error.
    await_name: bool = False


def nodes_of(request: LaunchRequest, cluster: Cluster) -> Nodes:
    """Return the nodes of the job: the user's request comes before the scheduler's decision.

    Raises:
        WrongUse: the rank or the endpoint is missing, or contradicts the number of nodes.
    """
    count = cluster.nnodes if request.nnodes is None else request.nnodes
    rank = cluster.node_rank if request.node_rank is None else request.node_rank
    endpoint = request.rdzv_endpoint or cluster.rdzv_endpoint
    job_id = request.rdzv_id or cluster.rdzv_id or "trainbox"
    if count == 1:
        if request.node_rank:
            raise WrongUse(
                f"node rank {request.node_rank} of 1 node: add --nnodes with the number of machines"
            )
        # A scheduler may start a job of several nodes on one.
        if request.rdzv_endpoint and request.nnodes is None and cluster.kind == "local":
            raise WrongUse(
                f"--rdzv-endpoint {endpoint} and 1 node: add --nnodes with the number of machines"
            )
        return Nodes(1, 0, "", job_id)
    if endpoint is None:
        raise WrongUse(
            f"{count} nodes requested without a rendezvous endpoint: give each node the address of "
            f"the first one, as in --rdzv-endpoint node0.example:{DEFAULT_PORT}"
        )
    _check_endpoint(endpoint)
    if rank is None:
        raise WrongUse(
            f"{count} nodes requested without a node rank: add --node-rank 0 here, 1 on the next "
            "node, and so on"
        )
    if rank >= count:
        raise WrongUse(
            f"node rank {rank} of {count} nodes: ranks count from 0, so the last is {count - 1}"
        )
    return Nodes(count, rank, endpoint, job_id, cluster.kind != "local")


def _check_endpoint(endpoint: str) -> None:
    """Raise WrongUse unless `endpoint` is the address or name of one machine, and a port."""
    parts = re.fullmatch(
        r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\s\[\]/*:]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.%]*):([0-9]{1,5})",
        endpoint,
    )
    host = parts[1].strip("[]").partition("%")[0] if parts else ""
    if (
        not parts
        or not endpoint.isprintable()
        or not 0 < int(parts[2]) < 65536
        or not _is_host(host)
    ):
        raise WrongUse(
            f"--rdzv-endpoint {endpoint} is not HOST:PORT: write it as in "
            f"node0.example:{DEFAULT_PORT}"
        )
    import socket  # a plan for one node does without it

    try:
        # inet_aton also accepts the short forms of IPv4 that the system does: 0 is 0.0.0.0.
        address = ipaddress.ip_address(host if ":" in host else socket.inet_aton(host))
    except (OSError, ValueError):
        return  # a name
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise WrongUse(
            f"--rdzv-endpoint {endpoint} is not the address of one machine: give the address by "
            f"which the other nodes reach node 0, as in 192.168.1.10:{DEFAULT_PORT}"
        )


def _is_host(host: str) -> bool:
    """Return whether `host` is an IPv6 address, or a name that the resolver can encode."""
    try:
        ipaddress.ip_address(host) if ":" in host else host.encode("idna")
    except (
        ValueError
    ):  # for example the part of ::1 before its last colon, or a long part of a name
        return False
    return True
