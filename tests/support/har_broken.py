"""Variants of the task Har that are broken on purpose.

Each must have a lower accuracy than test_har.py requires of Har.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.tasks.har import Har


@dataclass(frozen=True)
class TimeLost(Har):
    """Shuffles the readings of each window; all channels have the same order."""

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor]:
        inputs_BCT, labels_B = batch
        order_BT = torch.rand(len(inputs_BCT), inputs_BCT.shape[2]).argsort(1)
        return inputs_BCT.gather(2, order_BT[:, None].expand_as(inputs_BCT)), labels_B


@dataclass(frozen=True)
class ChannelsLost(Har):
    """Sets three channels to zero, beginning with `first`."""

    first: int = 0

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor]:
        inputs_BCT, labels_B = batch
        kept_C1 = torch.ones(inputs_BCT.shape[1], 1)
        kept_C1[self.first : self.first + 3] = 0
        return inputs_BCT * kept_C1, labels_B


@dataclass(frozen=True)
class BodyUntrained(Har):
    """Trains only the last layer."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        assert isinstance(model, nn.Sequential)
        model[:-1].requires_grad_(False)
        return model
