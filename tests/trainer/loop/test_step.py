"""The optimizer step."""

import pytest
import torch

from tests.support.here import Here
from trainer.loop.step import EagerStep, learning_rate


def test_a_learning_rate_is_the_same_as_in_a_float32_tensor_on_a_gpu() -> None:
    in_a_tensor = torch.tensor(0.1 * 0.7, dtype=torch.float32).item()
    assert learning_rate(0.1, 0.7, torch.device("cuda", 0)) == in_a_tensor != 0.1 * 0.7
    assert learning_rate(0.1, 0.7, torch.device("cpu")) == 0.1 * 0.7


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
