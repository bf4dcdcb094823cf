"""The examples of each step are the same for any number of processes and workers."""

import contextlib
import itertools
import os
import random
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from tests.support.faults import needs_linux
from trainbox.errors import WrongUse
from trainbox.tensor_trees import to_device
from trainer.data import batches, examples
from trainer.data.batches import (
    EvaluationBatches,
    evaluation_batch_count,
    place_tensors,
    training_batches,
)
from trainer.data.examples import example_loader, length
from trainer.data.schedule import MicroBatch, Schedule, epoch_order, micro_batches
from trainer.parallel.world import World

CPU = torch.device("cpu")


def _schedule(
    examples: int,
    batch_size: int,
    steps: int,
    accumulation: int = 1,
    seed: int = 0,
    shards: int = 1,
) -> Schedule:
    return Schedule(
        seed,
        examples,
        batch_size,
        steps,
        micro_batches(batch_size, shards, accumulation, range(shards)),
    )


def plain(*tensors: Tensor) -> Dataset[Any]:
    """Return a dataset of tensors that is read example by example, through a loader."""
    return Subset(TensorDataset(*tensors), range(len(tensors[0])))


class Augmented(Dataset[Any]):
    """A dataset whose examples draw from all three generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = [float(torch.rand(())), float(numpy.random.rand()), random.random()]  # noqa: S311
        return {"index": index, "drawn": torch.tensor(drawn, dtype=torch.float64)}


@pytest.mark.parametrize("size", [1, 2, 7, 1437])
def test_an_epochs_order_is_a_permutation_that_depends_only_on_seed_and_epoch(size: int) -> None:
    order = epoch_order(3, 5, size)
    assert sorted(order.tolist()) == list(range(size))
    torch.manual_seed(99)
    torch.rand(10)
    state = torch.get_rng_state()
    assert epoch_order(3, 5, size).equal(order)
    assert torch.get_rng_state().equal(state)
    if size > 7:
        assert not epoch_order(3, 6, size).equal(order)
        assert not epoch_order(4, 5, size).equal(order)


# `build` refuses a batch smaller than shards x accumulation: a micro-batch would be empty.
_CUTS = [
    (batch_size, shards, accumulation)
    for batch_size, shards, accumulation in itertools.product(
        [1, 7, 13, 64, 384], [1, 2, 3, 4, 7], [1, 2, 3, 5]
    )
    if batch_size >= shards * accumulation
]


@pytest.mark.parametrize(("batch_size", "shards", "accumulation"), _CUTS)
def test_micro_batches_partition_the_global_batch_almost_equally(
    batch_size: int, shards: int, accumulation: int
) -> None:
    whole = micro_batches(batch_size, shards, accumulation, range(shards))
    assert [i for micro in whole for i in range(micro.start, micro.stop)] == list(range(batch_size))
    assert len(whole) == shards * accumulation
    sizes = {micro.size for micro in whole}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    for world_size in range(1, shards + 1):
        ranks = [World(rank, world_size, CPU).owned(shards) for rank in range(world_size)]
        shared = [
            micro
            for owned in ranks
            for micro in micro_batches(batch_size, shards, accumulation, owned)
        ]
        assert tuple(shared) == whole
        assert all(len(owned) for owned in ranks)


def test_a_micro_batch_has_its_shard_and_part() -> None:
    assert micro_batches(7, 2, 2, [1]) == (MicroBatch(1, 0, 3, 5), MicroBatch(1, 1, 5, 7))
    assert MicroBatch(1, 0, 3, 5).size == 2


@pytest.mark.parametrize("world_size", range(1, 6))
def test_owned_blocks_are_consecutive_and_the_first_is_never_empty(world_size: int) -> None:
    for count in range(12):
        blocks = [World(rank, world_size, CPU).owned(count) for rank in range(world_size)]
        assert [i for block in blocks for i in block] == list(range(count))
        assert len(blocks[0]) == max(map(len, blocks))
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
        assert blocks == [
            World(0, world_size, CPU).owned_by(rank, count) for rank in range(world_size)
        ]


@pytest.mark.parametrize("start", [0, 1, 4, 5, 9, 16])
def test_the_indices_from_a_later_step_are_the_tail_of_all_indices(start: int) -> None:
    # 4 epochs of 4 steps
    schedule = _schedule(examples=23, batch_size=5, steps=16, accumulation=2)
    whole = [(epoch, indices.tolist()) for epoch, indices in schedule.indices(0)]
    tail = [(epoch, indices.tolist()) for epoch, indices in schedule.indices(start)]
    assert tail == whole[2 * start :]
    assert len(whole) == 32


def test_an_epoch_has_each_example_at_most_once_and_drops_different_ones() -> None:
    schedule = _schedule(examples=23, batch_size=5, steps=16)
    epochs: dict[int, list[int]] = {}
    for epoch, indices in schedule.indices(0):
        epochs.setdefault(epoch, []).extend(indices.tolist())
    assert list(epochs) == [0, 1, 2, 3]
    for shown in epochs.values():
        assert len(shown) == len(set(shown)) == 20
    assert len({frozenset(shown) for shown in epochs.values()}) > 1
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("start", [0, 5])
def test_tensors_and_a_loader_give_the_same_examples_in_the_same_order(start: int) -> None:
    tensors = torch.arange(23), torch.arange(46, dtype=torch.float32).view(23, 2)
    schedule = _schedule(examples=23, batch_size=5, steps=9, accumulation=2)
    held = list(training_batches(TensorDataset(*tensors), schedule, start, CPU, 0))
    loaded = list(training_batches(plain(*tensors), schedule, start, CPU, 0))
    assert len(held) == len(loaded) == 2 * (9 - start)
    for one, other in zip(held, loaded, strict=True):
        assert all(a.equal(b) for a, b in zip(one, other, strict=True))


class _Streams:
    """Stand-ins for the streams of a GPU, whose device holds its tensors in the host's memory.

    `log` has the copies, the waits and the batches in the order of the calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.created: list[torch.device] = []
        self._current = "computing"
        batches._CopyStream.cache_clear()
        monkeypatch.setattr(torch.cuda, "Stream", self._create)
        monkeypatch.setattr(torch.cuda, "stream", self._entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self)
        monkeypatch.setattr("trainer.data.batches.to_device", self._copy)
        empty, keep = torch.empty, self._keep

        def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            """Return memory that is not pinned, which would need a GPU."""
            return empty(*shape, **options)

        def record_stream(tensor: Tensor, stream: Any) -> None:
            keep(tensor, stream)

        monkeypatch.setattr(torch, "empty", unpinned)
        monkeypatch.setattr(Tensor, "record_stream", record_stream)

    def _create(self, device: torch.device) -> "_Streams":
        self.created.append(device)
        return self

    @contextlib.contextmanager
    def _entered(self, _stream: Any) -> Iterator[None]:
        self._current = "copying"
        yield
        self._current = "computing"

    def _copy(self, batch: Any, device: torch.device) -> Any:
        assert self._current == "copying"
        assert device.type == "cuda"
        self.log.append(f"copy {int(batch[0][0])}")
        return tuple(tensor.clone() for tensor in batch)

    def record_event(self) -> str:
        return self.log[-1]  # the copy that was just started

    def wait_event(self, event: str) -> None:
        assert self._current == "computing"
        self.log.append(f"wait for {event}")

    def _keep(self, tensor: Tensor, stream: Any) -> None:
        assert stream is self
        self.log.append(f"keep {int(tensor.flatten()[0])}")


@pytest.mark.parametrize("dataset", [TensorDataset, plain])
def test_a_gpu_copies_the_next_batch_while_it_computes(
    monkeypatch: pytest.MonkeyPatch, dataset: type[Any]
) -> None:
    tensors = torch.arange(6), torch.arange(12).view(6, 2)
    schedule = _schedule(examples=6, batch_size=2, steps=3)
    expected = list(training_batches(dataset(*tensors), schedule, 0, CPU, 0))
    monkeypatch.setattr("trainer.data.batches.example_loader", lambda *_arguments: expected)
    streams = _Streams(monkeypatch)
    for number, batch in enumerate(
        training_batches(dataset(*tensors), schedule, 0, torch.device("cuda", 0), 0)
    ):
        assert all(map(torch.equal, batch, expected[number]))
        streams.log.append(f"compute {int(batch[0][0])}")
    first, second, third = (int(batch[0][0]) for batch in expected)
    assert streams.log == [
        *(f"copy {first}", f"copy {second}"),
        *(f"wait for copy {first}", f"keep {first}", f"keep {2 * first}", f"compute {first}"),
        f"copy {third}",
        *(f"wait for copy {second}", f"keep {second}", f"keep {2 * second}", f"compute {second}"),
        *(f"wait for copy {third}", f"keep {third}", f"keep {2 * third}", f"compute {third}"),
    ]


def _batches(workers: int, start: int) -> list[tuple[list[int], list[list[float]]]]:
    schedule = _schedule(examples=23, batch_size=5, steps=9, seed=7)
    batches = training_batches(Augmented(), schedule, start, CPU, workers)
    return [(batch["index"].tolist(), batch["drawn"].tolist()) for batch in batches]


# The warning comes on a machine with two cores.
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("workers", [1, 3])
def test_random_augmentation_is_the_same_with_any_number_of_workers_and_from_any_start(
    workers: int,
) -> None:
    whole = _batches(0, 0)
    assert len(whole) == 9
    assert _batches(0, 6) == whole[6:]
    assert _batches(workers, 0) == whole
    assert _batches(workers, 6) == whole[6:]
    # The same example is augmented differently in the next epoch, by each generator.
    first = {
        index: drawn
        for indices, draws in whole[:4]
        for index, drawn in zip(indices, draws, strict=True)
    }
    again = {
        index: drawn
        for indices, draws in whole[4:8]
        for index, drawn in zip(indices, draws, strict=True)
    }
    for index in first.keys() & again.keys():
        assert all(a != b for a, b in zip(first[index], again[index], strict=True))
    assert len({tuple(drawn) for drawn in first.values()}) == 20


def _own(
    number: int, world_size: int, examples: int, batch_size: int, dataset: Dataset[Any]
) -> Iterator[tuple[int, Any]]:
    own = World(number, world_size, CPU).owned(evaluation_batch_count(examples, batch_size))
    yield from EvaluationBatches(dataset, batch_size, own, CPU, 0).iterate()


@pytest.mark.parametrize("examples", [1, 5, 17, 257])
@pytest.mark.parametrize("batch_size", [1, 8, 17, 500])
@pytest.mark.parametrize("kind", [TensorDataset, plain])
def test_evaluation_covers_each_example_once(examples: int, batch_size: int, kind: Any) -> None:
    for world_size in (1, 2, 3, 5):
        seen, batches = [], 0
        for rank in range(world_size):
            for count, (indices,) in _own(
                rank, world_size, examples, batch_size, kind(torch.arange(examples))
            ):
                assert count == len(indices) <= batch_size
                seen += indices.tolist()
                batches += 1
        assert seen == list(range(examples))
        assert batches == evaluation_batch_count(examples, batch_size)


def _evaluated_twice() -> list[list[tuple[int, list[int], list[list[float]]]]]:
    # A separate function, because a failing test would keep the workers alive until pytest ends.
    batches = EvaluationBatches(Augmented(), 10, range(3), CPU, 1)
    return [
        [(n, b["index"].tolist(), b["drawn"].tolist()) for n, b in batches.iterate()]
        for _ in range(2)
    ]


def test_a_repeated_evaluation_with_the_same_workers_draws_the_same() -> None:
    first, second = _evaluated_twice()
    assert first == second
    assert [n for n, _, _ in first] == [10, 10, 3]
    assert [i for _, indices, _ in first for i in indices] == list(range(23))


def test_tensors_in_nested_containers_are_moved() -> None:
    tensor = torch.ones(2)
    batch = {"a": tensor, "b": [tensor, ("name", tensor)], "c": 3}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"].device.type == "meta"
    assert isinstance(moved["b"], list)
    assert moved["b"][0].device.type == "meta"
    assert isinstance(moved["b"][1], tuple)
    assert moved["b"][1][0] == "name"
    assert moved["b"][1][1].device.type == "meta"
    assert moved["c"] == 3
    assert to_device(tensor, CPU) is tensor


def test_tensors_stay_on_a_cpu() -> None:
    held, other = TensorDataset(torch.ones(3)), plain(torch.ones(3))
    assert place_tensors(held, CPU) is held
    assert place_tensors(other, CPU) is other


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_a_dataset_without_a_length_is_refused() -> None:
    with pytest.raises(WrongUse, match=r"Endless has no length \(.*\): use a map-style dataset"):
        length(Endless())


@needs_linux
def test_a_worker_whose_parent_is_killed_during_its_start_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy machine may run a worker only after its parent was killed."""
    held, holding = os.pipe()  # the worker holds it until it ends
    real = examples.leave_signals_to_the_parent

    def late(parent: int | None) -> None:
        killed = os.getppid()
        os.kill(killed, signal.SIGKILL)
        while os.getppid() == killed:
            time.sleep(0.01)
        signal.alarm(90)  # ends it in any case, after the test has failed
        real(parent)

    monkeypatch.setattr(examples, "leave_signals_to_the_parent", late)
    if (pid := os.fork()) == 0:
        try:
            data = TensorDataset(torch.arange(4.0))
            next(iter(example_loader(data, 0, [[(0, 0)]], CPU, 1)))
        finally:
            os._exit(0)
    os.close(holding)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert select.select([held], [], [], 60)[0], "the worker still runs"
    assert not os.read(held, 1)
    os.close(held)
