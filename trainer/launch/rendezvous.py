"""Connect the nodes of a job.

Node 0 listens at the endpoint until all other nodes are connected and have joined. A node joins in
this order:

1. Both sides send a nonce. With a secret, all later messages are signed.
2. The node sends its hello: its rank, its job and its number of processes.
3. Node 0 checks the hello, and refuses the node or keeps its connection.
4. When all nodes have joined, node 0 sends the port of torch's store to each of them.

`host` is the side of node 0, and `join` is that of the other nodes. The reasons are in
docs/decisions/0012-nodes-meet-on-one-interface.md.
"""

from trainer.launch.host import host
from trainer.launch.join import join
from trainer.launch.meeting import Meeting
from trainer.launch.node import Log, Node


def meet(node: Node, log: Log) -> Meeting:
    """Wait until all nodes are connected, and log every 10 s which nodes are missing.

    Raises:
        WrongUse: The host of the endpoint is unknown, or on node 0 it is not this machine. Or the
            nodes contradict each other.
        NetworkFailure: The port of the endpoint is in use, or a node is missing after `timeout_s`.
    """
    return host(node, log) if node.rank == 0 else join(node, log)
