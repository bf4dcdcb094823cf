"""A model with everything that makes an exchange of gradients difficult.

The buckets are small, so that there are many.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainbox import Task
from trainer.parallel import exchange as reduction

reduction._BUCKET_BYTES = 300


class _Net(nn.Module):
    """A model with parameters of two types, in channels-last layout, frozen and unused.

    Its buffers change at different times.
    """

    late: Tensor
    seen: Tensor
    wide: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.gate = nn.Linear(36, 5)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        self.norm = nn.BatchNorm1d(5)  # of zeros in the first forward
        self.lower, self.head = nn.Linear(36, 7).bfloat16(), nn.Linear(12, 1)
        self.frozen, self.unused = nn.Linear(12, 1).requires_grad_(False), nn.Linear(3, 3)
        self.register_buffer("late", torch.zeros(3))
        self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("cache", None, persistent=False)

    def forward(self, images_B233: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.ones(36)
        features = (
            self.convolution(nn.functional.pad(images_B233, (0, 1, 0, 1))).flatten(1) * self.cache
        )
        if self.training:
            self.seen += (images_B233 > 0).sum()
            self.wide.lerp_(images_B233.double().mean((0, 2, 3)), 0.1)
            if self.seen > 200:
                self.late.lerp_(features.detach().mean().expand(3), 0.5)
        else:
            self.late += 1  # a validation that moves a buffer
        both = torch.cat(
            [self.norm(self.gate(features)), self.lower(features.bfloat16()).float()], 1
        )
        output: Tensor = (self.head(both) + self.frozen(both)).squeeze(1)
        return output


@torch.no_grad()
def _add_rank(parameter: Any) -> None:
    parameter += torch.distributed.get_rank() * 1e-3


@dataclass(frozen=True)
class Mixed(Task):
    epochs: ClassVar[int] = 3
    batch_size: ClassVar[int] = 15

    by_rank: bool = False

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        return self._images(90, 1)

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return self._images(20, 2)

    def build_model(self) -> nn.Module:
        return _Net()

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images_B233, targets_B = batch
        return {"error": (model(images_B233) - targets_B).square()}

    def build_optimizer(
        self, model: nn.Module, name: str, learning_rate: float, weight_decay: float | None
    ) -> Any:
        """Leave out the convolution, which has gradients: they must not add up over the steps."""
        rest = [
            p
            for n, p in model.named_parameters()
            if p.requires_grad and not n.startswith("convolution")
        ]
        optimizer = torch.optim.SGD(rest, lr=0.01, momentum=0.9)
        if self.by_rank:
            optimizer.register_step_post_hook(lambda *_: _add_rank(model.head.bias))
        return optimizer

    def _images(self, count: int, seed: int) -> TensorDataset:
        images = torch.randn(count, 2, 3, 3, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(images, images.sum((1, 2, 3)))
