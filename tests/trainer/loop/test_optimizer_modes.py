"""An optimizer with other weights for an evaluation is refused by its name."""

from typing import Any

import pytest
import torch

from tests.support.here import Here
from tests.support.tiny import TINY, Tiny


class ScheduleFree(torch.optim.SGD):
    """Has the two modes of a schedule-free optimizer."""

    def train(self) -> None:
        """Use the weights of the training."""

    def eval(self) -> None:
        """Use the averaged weights."""


class OnlyTrain(torch.optim.SGD):
    """Has a method of one of the two names."""

    def train(self) -> None:
        """Count something."""


def _build(*kinds: Any) -> Any:
    def build(_task: Tiny, model: torch.nn.Module, *_: Any) -> Any:
        groups = [[parameter] for parameter in model.parameters()]
        return tuple(kind(group, lr=0.1) for kind, group in zip(kinds, groups, strict=False))

    return build


@pytest.mark.parametrize(
    "kinds", [(ScheduleFree,), (torch.optim.SGD, ScheduleFree), (ScheduleFree, torch.optim.Adam)]
)
def test_an_optimizer_with_two_modes_is_refused(here: Here, kinds: Any) -> None:
    here.plant(build_optimizer=_build(*kinds))
    err = here.refused("train", TINY, "--device", "cpu", code=2)
    assert "task Tiny: ScheduleFree keeps other weights for training than for evaluation" in err


def test_an_optimizer_with_one_of_the_methods_is_used(here: Here) -> None:
    here.plant(build_optimizer=_build(OnlyTrain))
    assert "OnlyTrain" in here.train(max_steps=1)
