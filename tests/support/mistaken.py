"""A task with a mistake on one rank or on all, named on the command line by this file's path."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainbox import Classification


@dataclass(frozen=True)
class Mistaken(Classification):
    """Two classes of four numbers; the first 41 of 50 validation examples are of one class."""

    class_names: ClassVar[tuple[str, ...]] = ("a", "b")
    batch_size: ClassVar[int] = 16
    epochs: ClassVar[int] = 1

    mistake: str = ""

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        return TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return TensorDataset(torch.randn(50, 4), (torch.arange(50) > 40).long())

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if self.mistake == "rank 1" and os.environ["RANK"] == "1":
            raise ValueError("only here")
        return super().losses(model, batch)

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        if self.mistake == "metrics":
            raise ValueError("never")
        if self.mistake == "sample" and totals["examples"] < 50:
            raise ValueError("only one class")
        return super().metrics(totals)

    def statistics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        # in the rank's working folder
        with Path(f"validated-{os.environ['RANK']}").open("a") as file:
            file.write(f"{len(batch[0])}\n")
        return super().statistics(model, batch)

    def figures(
        self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if self.mistake == "figures":
            raise ValueError("no picture")
        if self.mistake in ("sample", "sample for figures") and totals["examples"] < 50:
            raise ValueError("only one class")
        return {}
