"""torchrun's rendezvous for nodes that have met already."""

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # its stub lacks both
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)


class KnownNodes(RendezvousHandler):
    """Gives torchrun the `store` of all `nnodes` of the job `job`, and the number of this node.

    torchrun's own rendezvous would open a store on all interfaces. The ranks connect to the store
    at `address` and `port`, and so does torchrun if `store` is None. If the port is 0, the ranks
    have a store of their own.
    """

    def __init__(
        self, job: str, node_rank: int, nnodes: int, store: Store | None, address: str, port: int
    ) -> None:
        self._job, self._node_rank, self._nnodes, self._store = job, node_rank, nnodes, store
        self._where = RendezvousStoreInfo(address, port)

    @property
    def use_agent_store(self) -> bool:
        return self._where.master_port > 0

    def get_backend(self) -> str:
        return "trainbox"

    def get_run_id(self) -> str:
        return self._job

    def next_rendezvous(self) -> RendezvousInfo:
        store = self._store or TCPStore(self._where.master_addr, self._where.master_port)
        return RendezvousInfo(store, self._node_rank, self._nnodes, self._where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
