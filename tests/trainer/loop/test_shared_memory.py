"""The shared memory that loader workers need is compared with /dev/shm before the first step."""

import shutil
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.support.here import Here, StopAfter
from tests.support.tiny import Tiny
from trainbox.contract.errors import Preempted, StorageFailure
from trainer.data.examples import read_examples
from trainer.data.nested import tensors_in
from trainer.loop.shared_memory import LoaderBatches, least_bytes

# The tests use more workers than this machine has CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

_Usage = namedtuple("_Usage", "total used free")
_MIB = 2**20


@pytest.mark.parametrize(
    ("workers", "between", "pinned", "need"),
    [
        # A validation begins while training batches are prefetched.
        (3, True, False, (2 * 3 + 2) * 100 + 3 * 10),
        (3, False, False, 3 * 100),
        (3, True, True, 3 * 100),
        (60, True, False, 90 * 100 + 20 * 10),  # at most all batches
        (60, True, True, 60 * 100),
        (0, True, True, 0),
    ],
)
def test_the_least_bytes(workers: int, between: bool, pinned: bool, need: int) -> None:
    assert (
        least_bytes(LoaderBatches(90, 100), LoaderBatches(20, 10), workers, between, pinned) == need
    )


def test_a_validation_may_need_more_than_the_training() -> None:
    assert least_bytes(LoaderBatches(90, 100), LoaderBatches(20, 1000), 3, False, False) == 3 * 1000


class _Wide(Dataset[Any]):
    """A dataset whose examples have 256 KiB of unused padding."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return *self.data[index], {"padding": [torch.zeros(2**16)]}


@pytest.fixture
def wide(here: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    """Return a `here` whose 50 training and 20 validation examples come through loaders.

    A batch of 8 examples has 2 MiB and a few bytes.
    """
    plain = {
        name: getattr(Tiny, name) for name in ("train_dataset", "validation_dataset", "losses")
    }
    for name in ("train_dataset", "validation_dataset"):
        monkeypatch.setattr(
            Tiny, name, lambda task, folder, name=name: _Wide(plain[name](task, folder))
        )
    monkeypatch.setattr(
        Tiny, "losses", lambda task, model, batch: plain["losses"](task, model, batch[:2])
    )
    return here


def _with_free(monkeypatch: pytest.MonkeyPatch, mib: float) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _path: _Usage(2**40, 2**40 - int(mib * _MIB), int(mib * _MIB))
    )


def _needed_mib(here: Here, **settings: Any) -> int:
    with pytest.raises(StorageFailure) as failure:
        here.train(**settings)
    message = str(failure.value).split()
    assert message[message.index("free,") - 2 : message.index("free,")] == ["0", "MiB"]
    return int(message[message.index("least") + 1])


def test_the_need_of_a_training(wide: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_free(monkeypatch, 0.5)
    assert _needed_mib(wide, workers=2) == 6 * 2 + 2 * 2 + 1  # 1 MiB for the targets, rounded up
    assert _needed_mib(wide, workers=2, epochs=1) == 2 * 2 + 1  # only the last validation
    assert _needed_mib(wide, workers=2, eval_every=3) == 2 * 2 + 1
    assert _needed_mib(wide, workers=2, accumulation=2) == 6 + 2 + 1
    assert _needed_mib(wide, workers=2, shards=4, threads=1) == 6 // 2 + 1 + 1
    # 7 training batches and 3 validation batches
    assert _needed_mib(wide, workers=9, max_steps=7) == 7 * 2 + 3 * 2 + 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert _needed_mib(wide, workers=2) == 3 * (6 * 2 + 2 * 2) + 1


def test_a_training_starts_with_enough_memory_or_without_workers(
    wide: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_free(monkeypatch, 6 * 2 + 2 * 2 + 0.1)
    with pytest.raises(Preempted):
        wide.train(workers=2, stop=StopAfter(1))
    _with_free(monkeypatch, 6 * 2 + 2 * 2 - 0.1)
    with pytest.raises(
        StorageFailure,
        match="the 2 loader workers need at least 17 MiB for batches: .*--workers 0",
    ):
        wide.train(workers=2)
    with pytest.raises(
        StorageFailure, match="the 4 loader workers .* --shm-size=1025g .* add --workers 0"
    ):
        wide.train(workers=4)
    _with_free(monkeypatch, 2 * (4 * 2 + 1 * 2) + 0.1)
    with pytest.raises(StorageFailure, match="the 4 loader workers .* or add --workers 1$"):
        wide.train(workers=4)
    with pytest.raises(Preempted):
        wide.train(workers=1, stop=StopAfter(1))
    _with_free(monkeypatch, 0)
    wide.train(workers=0)


def test_without_dev_shm_nothing_is_compared(wide: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "disk_usage", missing)
    with pytest.raises(Preempted):
        wide.train(workers=1, stop=StopAfter(1))


def test_read_examples_are_copied_out_of_shared_memory() -> None:
    read, _ = read_examples(_Wide(Tiny()._examples(9, 0)), 0, [0, 5, 8], 2)
    assert [len(tensors_in(batch)) for batch in read] == [3, 3, 3]
    assert not any(tensor.is_shared() for tensor in tensors_in(read))
