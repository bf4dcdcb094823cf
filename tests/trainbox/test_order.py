"""The order of an epoch is fixed."""

import pytest

from trainbox import WrongUse, epoch_order


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
