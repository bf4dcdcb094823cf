"""What loader workers need in /dev/shm, and that it is compared with what is free before the first
step.
"""

import shutil
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.support.here import Here, StopAfter
from tests.support.tiny import Tiny
from trainer.data.examples import read_examples
from trainer.data.nested import tensors_in
from trainer.errors import Preempted, StorageFailure
from trainer.loop.shared_memory import LoaderBatches, least_bytes

# more workers than this machine has CPUs
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

_Usage = namedtuple("_Usage", "total used free")
_MIB = 2**20


@pytest.mark.parametrize(
    ("workers", "between", "pinned", "need"),
    [
        # a validation begins while the training's workers are ahead
        (3, True, False, (2 * 3 + 2) * 100 + 3 * 10),
        (3, False, False, 3 * 100),
        (3, True, True, 3 * 100),
        (60, True, False, 90 * 100 + 20 * 10),  # no more than there are
        (60, True, True, 60 * 100),
        (0, True, True, 0),
    ],
)
def test_what_is_needed_at_least(workers: int, between: bool, pinned: bool, need: int) -> None:
    assert (
        least_bytes(LoaderBatches(90, 100), LoaderBatches(20, 10), workers, between, pinned) == need
    )


def test_a_validation_may_need_more_than_the_training() -> None:
    assert least_bytes(LoaderBatches(90, 100), LoaderBatches(20, 1000), 3, False, False) == 3 * 1000


class _Wide(Dataset[Any]):
    """Each example has 256 KiB of padding that nobody looks at."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return *self.data[index], {"padding": [torch.zeros(2**16)]}


@pytest.fixture
def wide(here: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    """50 examples to train and 20 to validate come through loaders; batches of 8 are of 2 MiB, and
    a few bytes.
    """
    plain = {
        name: getattr(Tiny, name) for name in ("train_dataset", "validation_dataset", "losses")
    }
    for name in ("train_dataset", "validation_dataset"):
        monkeypatch.setattr(
            Tiny, name, lambda task, place, name=name: _Wide(plain[name](task, place))
        )
    monkeypatch.setattr(
        Tiny, "losses", lambda task, model, batch: plain["losses"](task, model, batch[:2])
    )
    return here


def _with_free(monkeypatch: pytest.MonkeyPatch, mib: float) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda place: _Usage(2**40, 2**40 - int(mib * _MIB), int(mib * _MIB))
    )


def _needed_mib(here: Here, **settings: Any) -> int:
    with pytest.raises(StorageFailure) as failure:
        here.train(**settings)
    words = str(failure.value).split()
    assert words[words.index("free,") - 2 : words.index("free,")] == ["0", "MiB"]
    return int(words[words.index("least") + 1])


def test_what_a_training_needs(wide: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_free(monkeypatch, 0.5)
    assert _needed_mib(wide, workers=2) == 6 * 2 + 2 * 2 + 1  # the targets' bytes, rounded up
    assert _needed_mib(wide, workers=2, epochs=1) == 2 * 2 + 1  # no validation before the last
    assert _needed_mib(wide, workers=2, eval_every=3) == 2 * 2 + 1
    assert _needed_mib(wide, workers=2, accumulation=2) == 6 + 2 + 1
    assert _needed_mib(wide, workers=2, shards=4, threads=1) == 6 // 2 + 1 + 1
    # 7 batches to train, 3 to validate
    assert _needed_mib(wide, workers=9, max_steps=7) == 7 * 2 + 3 * 2 + 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert _needed_mib(wide, workers=2) == 3 * (6 * 2 + 2 * 2) + 1


def test_it_trains_with_what_it_needs_or_without_workers(
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


def test_where_there_is_no_such_place_nothing_is_compared(
    wide: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(place: str) -> Any:
        raise FileNotFoundError(place)

    monkeypatch.setattr(shutil, "disk_usage", missing)
    with pytest.raises(Preempted):
        wide.train(workers=1, stop=StopAfter(1))


def test_examples_that_are_read_leave_nothing_in_shared_memory() -> None:
    read, _ = read_examples(_Wide(Tiny()._examples(9, 0)), 0, [0, 5, 8], 2)
    assert [len(tensors_in(batch)) for batch in read] == [3, 3, 3]
    assert not any(tensor.is_shared() for tensor in tensors_in(read))
