"""The optimizer step."""

import torch

from trainer.loop.step import learning_rate


def test_a_learning_rate_is_the_same_as_in_a_float32_tensor_on_a_gpu() -> None:
    in_a_tensor = torch.tensor(0.1 * 0.7, dtype=torch.float32).item()
    assert learning_rate(0.1, 0.7, torch.device("cuda", 0)) == in_a_tensor != 0.1 * 0.7
    assert learning_rate(0.1, 0.7, torch.device("cpu")) == 0.1 * 0.7
