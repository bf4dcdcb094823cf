"""The batches and the random numbers of a step depend only on the seed and the position."""

import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainbox import Batches, SeededDataset, WrongUse, epoch_order, seed_step


def _batches(world_size: int, first_step: int, steps: int) -> list[list[int]]:
    """Return the sorted examples of each step of all ranks, in batches of 12 from 50 examples."""
    data, found = TensorDataset(torch.arange(50)), [list[int]() for _ in range(steps)]
    for rank in range(world_size):
        batches = Batches(data, 12, seed=3, rank=rank, world_size=world_size)
        loader = DataLoader(data, batch_sampler=batches)
        step = first_step
        while step < first_step + steps:
            batches.set_step(step)
            assert len(loader) == 4 - step % 4
            for (examples,) in loader:
                if step < first_step + steps:
                    found[step - first_step] += examples.tolist()
                step += 1
    return [sorted(batch) for batch in found]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_steps_have_the_same_examples_on_each_number_of_ranks(world_size: int) -> None:
    whole = [
        sorted(epoch_order(3, epoch, 50)[first : first + 12])
        for epoch in range(3)
        for first in range(0, 48, 12)
    ]
    assert _batches(world_size, 0, 12) == whole
    # In the middle of an epoch, and at its end.
    assert _batches(world_size, 5, 7) == whole[5:]
    assert _batches(world_size, 8, 4) == whole[8:]


def test_each_rank_has_its_part_of_each_batch() -> None:
    batches = Batches(range(10), 4, seed=0, step=3, rank=1, world_size=2)
    order = epoch_order(0, 1, 10)
    assert batches.steps_per_epoch == 2
    assert [*batches] == [*batches] == [[order[5], order[7]]]


def test_the_ranks_are_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Batches(range(6), 3, seed=0)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    ranked = Batches(range(6), 3, seed=0)
    assert [(each.rank, each.world_size) for each in (alone, ranked)] == [(0, 1), (2, 3)]


# fmt: off
_ARGUMENTS = [
    ({"step": -1}, "step=-1 is not a number of finished steps: give 0 or more"),
    ({"batch_size": 0}, "batch_size=0 is not possible with 10 examples: give 1 to 10"),
    ({"batch_size": 11}, "batch_size=11 is not possible with 10 examples: give 1 to 10"),
    ({"rank": 2, "world_size": 2}, "rank=2 is not a rank of 2 processes: give 0 to 1"),
    ({"batch_size": 8, "rank": 0, "world_size": 3}, "batch_size=8 is of all ranks together, and "
     "3 ranks cannot share it equally: use a multiple of 3"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "message"), _ARGUMENTS)
def test_wrong_arguments_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(WrongUse, match=f"^{message}"):
        Batches(range(10), **{"batch_size": 2, "seed": 0, **arguments})


def test_only_batches_of_one_rank_have_a_size_for_libraries() -> None:
    """Accelerate and Lightning ask for the size before they split the batches once more."""
    assert Batches(range(10), 4, seed=0).batch_size == 4
    with pytest.raises(WrongUse, match="already split over the 2 ranks, and a library is about"):
        _ = Batches(range(10), 4, seed=0, rank=0, world_size=2).batch_size


def _draw() -> tuple[float, float, float]:
    return random.gauss(0, 1), float(numpy.random.rand()), torch.rand(()).item()


def test_a_step_has_the_same_numbers_whatever_was_drawn_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, on_gpus = [], list[int]()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", on_gpus.append)
    for rank, seed, step in [("0", 1, 5), ("1", 1, 5), ("0", 2, 5), ("0", 1, 6), ("0", 1, 5)]:
        monkeypatch.setenv("RANK", rank)
        seed_step(seed, step)
        found.append(_draw())
    assert found[0] == found[-1]
    for values in zip(*found, strict=True):  # of each generator
        assert len(set(values)) == 4
    assert on_gpus[0] == on_gpus[-1] and len(on_gpus) == 5 and len(set(on_gpus)) == 4


class _Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *_draw()], dtype=torch.float64)


def _examples(step: int, workers: int, ranks: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the sorted examples of `step` and later ones of its epoch."""
    data, rows = SeededDataset(_Noisy(), seed=1), []
    for rank, world_size in ranks:
        batches = Batches(data, 4, seed=0, step=step, rank=rank, world_size=world_size)
        rows += [*DataLoader(data, batch_sampler=batches, num_workers=workers)]
    return torch.stack(sorted(torch.cat(rows), key=lambda row: row[0].item()))


def test_an_example_has_the_same_augmentation_on_each_rank_and_worker_after_a_stop() -> None:
    first, again = _examples(0, 0, [(0, 1)]), _examples(0, 2, [(0, 2), (1, 2)])
    assert torch.equal(first, again)
    resumed = _examples(1, 1, [(0, 1)])
    assert all(any(torch.equal(row, other) for other in first) for row in resumed)
    other_epoch = _examples(2, 0, [(0, 1)])
    assert not any(torch.equal(row, other) for row in other_epoch for other in first)


def test_a_seeded_dataset_refuses_an_index_without_an_epoch() -> None:
    data = SeededDataset(_Noisy(), seed=1)
    loader = DataLoader(data, batch_sampler=Batches(data.dataset, 5, seed=0))  # type: ignore[arg-type]
    with pytest.raises(WrongUse, match="got the index 6 without an epoch: give the SeededDataset"):
        next(iter(loader))
