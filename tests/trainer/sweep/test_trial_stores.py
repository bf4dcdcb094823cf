"""The stores that a sweep offers to the scripts of its trials."""

import os
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub lacks it

from tests.support.processes import children_of, listening
from trainer.sweep.trial_stores import TrialStores

_MOST = timedelta(seconds=120)


@pytest.fixture
def stores() -> Iterator[TrialStores]:
    made = TrialStores()
    yield made
    made.close()


def joined(stores: TrialStores, port: int) -> TCPStore:
    """Return the store that the script of a trial gets at `port`."""
    got: list[TCPStore] = []
    script = threading.Thread(
        target=lambda: got.append(TCPStore("127.0.0.1", port, is_master=False, timeout=_MOST))
    )
    script.start()
    while script.is_alive():
        stores.serve()
        script.join(0.02)
    return got[0]


def test_each_trial_gets_a_store_that_only_this_machine_can_reach(stores: TrialStores) -> None:
    before = set(children_of(os.getpid()))
    stores.offer()
    stores.serve()
    assert set(children_of(os.getpid())) == before, "no script has connected yet"
    first = joined(stores, stores.offer())
    first.set("step", "1")
    (server,) = set(children_of(os.getpid())) - before
    assert listening(server) == {"127.0.0.1"}
    second = joined(stores, stores.offer())
    assert not second.check(["step"]), "the store of another trial"
    assert set(children_of(os.getpid())) - before == {server}
    stores.close()
    assert set(children_of(os.getpid())) == before
