"""torchrun's rendezvous for nodes that have met already."""

from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # its stub lacks both
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

STORE_TIMEOUT = timedelta(minutes=15)  # that of torchrun's own rendezvous


class KnownNodes(RendezvousHandler):
    """The nodes of the job `job`, which share a `store` at the address and port `where`.

    torchrun's own rendezvous would open a store on all interfaces. The ranks connect to the store,
    and so does torchrun if `store` is None. Without `where`, only this torchrun uses the store, and
    the ranks have another one.
    """

    def __init__(
        self,
        job: str,
        node_rank: int,
        nnodes: int,
        store: Store | None,
        where: tuple[str, int] | None,
    ) -> None:
        self._job, self._node_rank, self._nnodes = job, node_rank, nnodes
        self._store, self._where = store, where

    @property
    def use_agent_store(self) -> bool:
        return self._where is not None

    def get_backend(self) -> str:
        return "trainbox"

    def get_run_id(self) -> str:
        return self._job

    def next_rendezvous(self) -> RendezvousInfo:
        where, store = self._where, self._store
        if store is None:
            assert where is not None
            store = TCPStore(*where, timeout=STORE_TIMEOUT)
        # Without `where`, MASTER_PORT is a free port, for a task that needs one.
        build = RendezvousStoreInfo.build
        info = RendezvousStoreInfo(*where) if where else build(self._node_rank, store, "127.0.0.1")
        return RendezvousInfo(store, self._node_rank, self._nnodes, info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
