"""The optimizer step."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.support.here import Here
from trainbox.seeding import derive_seed
from trainer.data.schedule import MicroBatch
from trainer.loop.step import EagerStep, _seeds, learning_rate


def test_a_learning_rate_is_the_same_as_in_a_float32_tensor_on_a_gpu() -> None:
    in_a_tensor = torch.tensor(0.1 * 0.7, dtype=torch.float32).item()
    assert learning_rate(0.1, 0.7, on_gpu=True) == in_a_tensor != 0.1 * 0.7
    assert learning_rate(0.1, 0.7, on_gpu=False) == 0.1 * 0.7


def test_a_step_clears_all_gradients(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[object] = []
    step = EagerStep.__call__

    def stepped(self: EagerStep, needs_norm: bool) -> object:
        norm = step(self, needs_norm)
        left.extend(parameter.grad for parameter in self._job.state.model.parameters())
        return norm

    monkeypatch.setattr(EagerStep, "__call__", stepped)
    here.train(max_steps=2)
    assert left == [None] * 4


def test_seeds_depend_on_the_step_and_the_micro_batch_alone() -> None:
    micros = (MicroBatch(2, 0, 0, 4), MicroBatch(2, 1, 4, 8))
    for first_step in (0, 60):
        job = SimpleNamespace(
            config=SimpleNamespace(seed=7),
            schedule=SimpleNamespace(micros=micros),
            state=SimpleNamespace(progress=SimpleNamespace(step=first_step)),
        )
        found = list(itertools.islice(_seeds(cast("Any", job)), 300))
        assert found == [
            derive_seed(7, "forward", step, 2, part)
            for step in range(first_step, first_step + 150)
            for part in (0, 1)
        ]
