"""The sums of losses are exact in any order, and a resume restores them."""

import itertools
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.here import Here
from tests.support.tiny import Tiny
from trainbox.errors import WrongUse
from trainer.parallel.loss_sums import RunningLosses
from trainer.parallel.world import World


def _running(micro_count: int = 1) -> RunningLosses:
    return RunningLosses(World(0, 1, torch.device("cpu")), [micro_count])


@pytest.mark.parametrize("order", list(itertools.permutations([1e8, 1.0, -1e8, 3e-5])))
def test_the_sum_is_exact_in_any_order(order: tuple[float, ...]) -> None:
    running = _running(4)
    for value in order:
        running.add({"a": torch.tensor([value], dtype=torch.float64)})
    running.steps = 1
    assert running.means(2) == {"a": math.fsum(order) / 2}


def test_gathered_sums_are_restored_and_cleared() -> None:
    running = _running()
    running.add({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([5.0, 5.0])})
    running.steps = 1
    resumed = _running()
    resumed.restore(running.gather(), 1)
    assert resumed.gather() == {"a": [3.0], "b": [10.0]}  # a stop right after the resume
    resumed.add({"a": torch.tensor([4.0, 4.0]), "b": torch.tensor([0.0, 0.0])})
    resumed.steps += 1
    assert resumed.means(2) == {"a": 11 / 4, "b": 10 / 4}
    resumed.clear()
    assert (resumed.gather(), resumed.steps) == ({}, 0)


@pytest.mark.parametrize("values", [[math.inf, -math.inf], [math.nan, 1.0], [math.inf, 1.0]])
def test_a_sum_with_a_value_that_is_not_finite_is_nan(values: list[float]) -> None:
    running = _running()
    for value in values:
        running.add({"a": torch.tensor([value])})
    running.steps = 2
    assert math.isnan(running.means(1)["a"])


def test_the_graph_and_the_storage_of_a_loss_are_freed() -> None:
    running = _running()
    table = torch.ones(4, 1000, requires_grad=True) * 2
    freed = weakref.ref(table)
    running.add({"a": table.unbind(1)[0]})
    del table
    assert freed() is None
    assert running.gather() == {"a": [8.0]}


def test_many_losses_have_the_same_sums_as_each_alone() -> None:
    """The table grows twice. A skipped step is left out."""
    running, generator = _running(2), torch.Generator().manual_seed(0)
    micros = [
        {name: torch.randn(size, generator=generator) for name in "ab"} for size in range(1, 201)
    ]
    for number, losses_B in enumerate(micros):
        running.add(losses_B)
        running.steps += number % 2
        if number == 101:
            running.drop_step()
    kept = [losses_B for number, losses_B in enumerate(micros) if number not in (100, 101)]
    assert running.steps == 99
    assert running.gather() == {
        name: [float(losses_B[name].sum()) for losses_B in kept] for name in "ab"
    }


def test_other_names_are_refused() -> None:
    running = _running()
    running.add({"a": torch.ones(1)})
    with pytest.raises(WrongUse, match="returned a before and a, b now: return each loss in each"):
        running.add({"a": torch.ones(1), "b": torch.ones(1)})
    resumed = _running()
    resumed.restore({"a": [1.0]}, 1)
    with pytest.raises(WrongUse, match=r"losses\(\) returned a before and b now"):
        resumed.add({"b": torch.ones(1)})


def test_several_losses_train_as_their_sum_and_one_without_gradient_is_only_logged(
    here: Here,
) -> None:
    whole = Tiny.losses

    def parts(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
        loss_B = whole(task, model, batch)["squared_error"]
        return {"quarter": loss_B / 4, "rest": loss_B * 3 / 4, "off": torch.zeros(len(loss_B))}

    here.train("one", max_steps=5)
    here.plant(losses=parts)
    here.train("parts", max_steps=5)
    one, several = here.weights("one"), here.weights("parts")
    for name, weight in one.items():
        assert torch.allclose(weight, several[name], rtol=1e-4), name
    (entry,) = here.entries("train", "parts")
    assert entry["loss_off"] == 0
    assert entry["loss"] == pytest.approx(here.entries("train", "one")[0]["loss"], rel=1e-4)
