"""The optimizer step."""

import itertools
import math
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from tests.support.here import Here
from tests.support.tiny import Tiny
from trainbox.errors import WrongUse
from trainbox.order import derive_seed
from trainer.data.schedule import MicroBatch
from trainer.loop.step import _seeds, learning_rate


def test_a_learning_rate_is_the_same_as_in_a_float32_tensor_on_a_gpu() -> None:
    in_a_tensor = torch.tensor(0.1 * 0.7, dtype=torch.float32).item()
    assert learning_rate(0.1, 0.7, on_gpu=True) == in_a_tensor != 0.1 * 0.7
    assert learning_rate(0.1, 0.7, on_gpu=False) == 0.1 * 0.7


class Bad(Tiny):
    """Normalizes its inputs. The inputs of the steps 2 and 4 are infinite."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Flatten(0))

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_B4, targets_B = batch
        if model.training and int(model.get_buffer("0.num_batches_tracked")) in (1, 3):
            inputs_B4 = inputs_B4 * math.inf
        return {"squared_error": F.mse_loss(model(inputs_B4), targets_B, reduction="none")}


def test_a_skipped_step_leaves_no_trace_in_statistics_and_losses(here: Here) -> None:
    out = here.train(task=f"{__name__}:Bad", max_steps=6, skip_nonfinite=1, log_steps=3)
    assert [line.split(": ")[0] for line in out.splitlines() if "step is skipped" in line] == [
        "step 2",
        "step 4",
    ]
    entries = here.entries("train")
    assert [(entry["step"], entry["skipped_steps"]) for entry in entries] == [(3, 1), (6, 2)]
    assert all(0 < entry["loss"] < 100 for entry in entries)
    weights = here.weights()
    assert weights["0.num_batches_tracked"] == 6
    # Four steps have moved the variance from 1: each by a tenth of the way to about 1.
    assert torch.allclose(weights["0.running_var"], torch.ones(4), atol=0.5)


class AddsGroup(Tiny):
    """Adds a group of parameters to its optimizer in the third step."""

    optimizers: ClassVar[list[AdamW]] = []

    def build_optimizer(self, model: nn.Module, *_settings: Any) -> AdamW:
        self.optimizers.append(AdamW(model.parameters(), lr=0.5))
        return self.optimizers[-1]

    def schedule(self, step: int, *_: Any) -> float:
        if step == 2:
            self.optimizers[-1].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        return 1.0


def test_a_group_that_a_step_adds_is_refused(here: Here) -> None:
    with pytest.raises(WrongUse, match=r"AddsGroup: a parameter group was added .* by step 2: add"):
        here.train(task=f"{__name__}:AddsGroup", max_steps=4)


class RateInTensor(Tiny):
    def build_optimizer(self, model: nn.Module, *_settings: Any) -> AdamW:
        return AdamW(model.parameters(), lr=torch.tensor(0.25), fused=True)


def test_a_learning_rate_that_is_a_tensor_is_logged(here: Here) -> None:
    here.train(task=f"{__name__}:RateInTensor", max_steps=2, log_steps=1, warmup_epochs=0)
    assert here.entries("train")[0]["learning_rate"] == 0.25


def test_seeds_depend_on_the_step_and_the_micro_batch_alone() -> None:
    micros = (MicroBatch(2, 0, 0, 4), MicroBatch(2, 1, 4, 8))
    for first_step in (0, 60):
        job = SimpleNamespace(
            config=SimpleNamespace(seed=7),
            schedule=SimpleNamespace(micros=micros),
            state=SimpleNamespace(progress=SimpleNamespace(step=first_step)),
        )
        found = list(itertools.islice(_seeds(cast("Any", job)), 300))
        assert found == [
            derive_seed(7, "forward", step, 2, part)
            for step in range(first_step, first_step + 150)
            for part in (0, 1)
        ]
