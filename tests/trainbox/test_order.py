"""The order of an epoch is fixed, and a sampler resumes from an integer on any number of ranks."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from trainbox import Sampler, WrongUse, epoch_order


def test_the_order_never_changes() -> None:
    assert epoch_order(0, 0, 10) == [6, 8, 5, 4, 1, 3, 7, 0, 9, 2]
    assert epoch_order(0, 1, 10) == [6, 0, 7, 2, 9, 3, 8, 1, 4, 5]
    assert epoch_order(7, 0, 5) == [1, 0, 2, 3, 4]
    assert epoch_order(0, 0, 0) == []


def test_each_order_is_a_permutation_of_integers() -> None:
    orders = [epoch_order(seed, epoch, 100) for seed in range(3) for epoch in range(3)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 9
    assert {type(index) for index in orders[0]} == {int}


def test_a_negative_number_of_examples_is_refused() -> None:
    with pytest.raises(WrongUse, match=r"^n=-1 is not a number of examples: give 0 or more$"):
        epoch_order(0, 0, -1)


def _batches(world_size: int, first_step: int, steps: int) -> list[list[int]]:
    """Return the sorted examples of each step of all ranks, in batches of 12 from 50 examples."""
    data, batches = TensorDataset(torch.arange(50)), [list[int]() for _ in range(steps)]
    for rank in range(world_size):
        sampler = Sampler(data, seed=3, rank=rank, world_size=world_size)
        loader = DataLoader(data, 12 // world_size, sampler=sampler, drop_last=True)
        step = first_step
        while step < first_step + steps:
            epoch, index = divmod(step, 50 // 12)
            sampler.set_epoch(epoch, start=index * 12)
            for (examples,) in loader:
                if step < first_step + steps:
                    batches[step - first_step] += examples.tolist()
                step += 1
    return [sorted(batch) for batch in batches]


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


def test_a_batch_sampler_yields_lists_of_the_rank() -> None:
    sampler = Sampler(10, seed=0, epoch=1, start=4, rank=1, world_size=2)
    order = epoch_order(0, 1, 10)
    assert list(sampler) == [order[5], order[7], order[9]]
    assert len(sampler) == 3
    assert list(BatchSampler(sampler, 2, drop_last=True)) == [[order[5], order[7]]]


def test_all_ranks_have_the_same_number_of_examples() -> None:
    found = [list(Sampler(11, seed=0, start=1, rank=rank, world_size=4)) for rank in range(4)]
    assert [len(each) for each in found] == [2, 2, 2, 2]
    assert sorted(index for each in found for index in each) == sorted(epoch_order(0, 0, 11)[1:9])


def test_the_ranks_are_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Sampler(4, seed=0)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    ranked = Sampler(4, seed=0)
    assert [(each.rank, each.world_size) for each in (alone, ranked)] == [(0, 1), (2, 3)]


def test_positions_and_ranks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(WrongUse, match=r"start=11 is not a position in an epoch of 10 examples"):
        Sampler(10, seed=0, start=11)
    with pytest.raises(WrongUse, match=r"n=-3 is not a number of examples: give 0 or more"):
        Sampler(-3, seed=0)
    with pytest.raises(WrongUse, match=r"rank=2 is not a rank of 2 processes: give 0 to 1"):
        Sampler(10, seed=0, rank=2, world_size=2)
