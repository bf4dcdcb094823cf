"""Har with something broken on purpose: each must stay under what test_har.py asks of the whole
one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.tasks.har import Har


@dataclass(frozen=True)
class TimeLost(Har):
    """The readings of each window in an order drawn at random, the same for its channels."""

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor]:
        inputs_BCT, labels_B = batch
        order_BT = torch.rand(len(inputs_BCT), inputs_BCT.shape[2]).argsort(1)
        return inputs_BCT.gather(2, order_BT[:, None].expand_as(inputs_BCT)), labels_B


@dataclass(frozen=True)
class ChannelsLost(Har):
    """Three channels, from `first` on, are zero."""

    first: int = 0

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor]:
        inputs_BCT, labels_B = batch
        kept_C1 = torch.ones(inputs_BCT.shape[1], 1)
        kept_C1[self.first : self.first + 3] = 0
        return inputs_BCT * kept_C1, labels_B


@dataclass(frozen=True)
class BodyUntrained(Har):
    """Only the last layer learns."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        assert isinstance(model, nn.Sequential)
        model[:-1].requires_grad_(False)
        return model
