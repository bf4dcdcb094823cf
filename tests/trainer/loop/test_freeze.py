"""The tensors that `--freeze` leaves out of the training."""

import pytest
from torch import nn

from trainbox.errors import WrongUse
from trainer.loop.model import freeze


def test_tensors_that_the_task_has_frozen_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    with pytest.raises(WrongUse, match=r"--freeze 0 matches no trained tensor of the model"):
        freeze(model, ["0"])
    with pytest.raises(WrongUse, match="write one option for each, as in --freeze 0 --freeze 1"):
        freeze(model, ["0, 1"])
    with pytest.raises(WrongUse, match="matches all 2 trained tensors, so nothing would train"):
        freeze(model, ["1"])
    assert freeze(model, ["1.bias"]) == "1 of 2 tensors (1 of 3 parameters)"
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, False]
