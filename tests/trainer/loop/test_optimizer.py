"""Several optimizers of a task train as one."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from tests.support.here import Here
from tests.support.tiny import StepCounter, Tiny
from trainbox.errors import WrongUse
from trainer.loop.optimizer import joined


@dataclass(frozen=True)
class Parts(Tiny):
    """An AdamW for the weight and another optimizer for the bias."""

    kind: str = "sgd"

    def build_optimizer(
        self, model: nn.Module, name: str, learning_rate: float, weight_decay: float | None
    ) -> Optimizer | tuple[Optimizer, ...]:
        assert isinstance(model, StepCounter)
        weight, bias = [model.linear.weight], [model.linear.bias]
        if self.kind == "groups":
            groups = [{"params": weight}, {"params": bias, "lr": 0.01}]
            return AdamW(groups, lr=learning_rate, fused=True)
        first = AdamW(weight, lr=learning_rate, fused=True)
        if self.kind == "two":
            return first, AdamW(bias, lr=0.01, fused=True)
        return first, SGD(bias, lr=0.01, momentum=0.9)


_PARTS = f"{__name__}:Parts"


def test_two_optimizers_compute_the_same_as_two_groups(here: Here) -> None:
    here.train("two", task=_PARTS, fields={"kind": "two"})
    here.train("groups", task=_PARTS, fields={"kind": "groups"})
    assert here.digest("two") == here.digest("groups")


def test_the_state_of_each_optimizer_is_resumed(here: Here) -> None:
    out = here.train("whole", task=_PARTS)
    assert "optimizer  AdamW + SGD, which the task builds for --optimizer adamw" in out
    here.stopped(8, "stopped", task=_PARTS)
    here.train("stopped", task=_PARTS)
    assert here.digest("stopped") == here.digest("whole")
    states = here.state(18, "whole")["optimizer"]["state"]
    assert [sorted(states[i]) for i in (0, 1)] == [
        ["exp_avg", "exp_avg_sq", "step"],
        ["momentum_buffer"],
    ]


def test_a_state_that_exists_before_the_first_step_is_kept() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    second = SGD([other], momentum=0.5)
    second.state[other]["momentum_buffer"] = torch.full((2,), 3.0)
    optimizer = joined([SGD([one]), second])
    other.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[other]["momentum_buffer"].tolist() == [2.5, 2.5]


def test_another_kind_of_optimizer_refuses_the_checkpoint(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.stopped(8, task=_PARTS)
    monkeypatch.setattr(Parts, "build_optimizer", Tiny.build_optimizer)
    with pytest.raises(WrongUse, match=r"\(optimizer: AdamW \+ SGD -> AdamW\)"):
        here.train(task=_PARTS)
