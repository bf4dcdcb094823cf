"""A task whose model counts its forwards in an attribute, which may act late or on one rank."""

import os
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tests.support.tiny import StepCounter, Tiny


@dataclass(frozen=True)
class Counting(Tiny):
    """Halves its losses after `acts_after` forwards, and raises an error after `fails_after`."""

    acts_after: int = 10**9
    fails_after: int = 10**9
    only_rank: int = -1

    def build_model(self) -> nn.Module:
        model = StepCounter()
        model.calls = 0
        return model

    def losses(self, model: Any, batch: Any) -> dict[str, Tensor]:
        if model.training and self.only_rank in (-1, int(os.environ.get("RANK", "0"))):
            model.calls += 1
        if model.calls > self.fails_after:
            raise KeyError(f"call {model.calls}")
        factor = 0.5 if model.calls > self.acts_after else 1.0
        return {name: factor * loss_B for name, loss_B in super().losses(model, batch).items()}
