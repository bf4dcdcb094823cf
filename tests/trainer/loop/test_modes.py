"""Each step begins in training mode, also with a `train` of the model's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.here import Here, StopAfter
from trainbox.errors import Preempted, WrongUse


class Net(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.last: nn.Module = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs_B4: Tensor) -> Tensor:
        self.seen += self.training
        output_B: Tensor = self.last(self.norm(self.first(inputs_B4)).relu()).squeeze(1)
        return output_B


class FreezingLater(Net):
    """Stops the statistics of its batch norm by a number that a checkpoint has."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode and int(self.seen) >= 9:
            self.norm.eval()
        return self


class Stopping(Net):
    """A forward leaves a module in evaluation mode."""

    def forward(self, inputs_B4: Tensor) -> Tensor:
        output_B = super().forward(inputs_B4)
        self.norm.eval()
        return output_B


class Exchanging(Net):
    """Gets another module in its third step, which is in evaluation mode."""

    def forward(self, inputs_B4: Tensor) -> Tensor:
        output_B = super().forward(inputs_B4)
        if self.training and int(self.seen) == 3:
            self.last = nn.Sequential(nn.Linear(8, 1), nn.Dropout(0.5)).eval()
        return output_B


@pytest.mark.parametrize("net", [FreezingLater, Stopping])
def test_a_resume_within_an_epoch_has_the_same_bits(here: Here, net: type[Net]) -> None:
    here.plant(
        build_model=lambda _task: net(),
        losses=lambda _task, model, batch: {"error": (model(batch[0]) - batch[1]).square()},
    )
    here.train("undisturbed", eval_every=9)
    with pytest.raises(Preempted):
        here.train("stopped", eval_every=9, stop=StopAfter(10))
    here.train("stopped", eval_every=9)
    assert here.digest("stopped") == here.digest("undisturbed")


def test_a_new_module_is_put_in_training_mode(here: Here) -> None:
    modes = list[bool]()

    def losses(_task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
        if torch.is_grad_enabled():
            modes.append(all(module.training for module in model.modules()))
        return {"error": (model(batch[0]) - batch[1]).square()}

    here.plant(build_model=lambda _task: Exchanging(), losses=losses)
    with pytest.raises(WrongUse, match="the model has changed since it was built"):
        here.train(max_steps=6)
    assert modes == [True] * 6
