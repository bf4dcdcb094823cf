"""Metrics of the training: values of `losses` that are logged and not minimised."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.support.here import Here
from tests.support.tiny import Tiny
from trainbox.classification import Classification

_NEAR = "tests.trainer.loop.test_train_metrics:Near"
_TRAIN = ("train", "--device", "cpu", "--run", "r")


@dataclass(frozen=True)
class Near(Tiny):
    """Logs the share of training examples whose error is below `limit`."""

    train_metrics: ClassVar[tuple[str, ...]] = ("near",)
    limit: float = 1.0

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        losses = super().losses(model, batch)
        # A gradient of this value would change the training.
        return {"near": losses["squared_error"].sqrt() / self.limit, **losses}


class Rounded(Near):
    """Counts the examples, so that all sums are exact."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        losses = super().losses(model, batch)
        return {**losses, "near": losses["near"] < 1}


class Undefined(Near):
    """Has a metric that is not a number."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        losses = super().losses(model, batch)
        return {**losses, "near": losses["near"] * torch.nan}


def test_a_metric_does_not_change_the_training(here: Here) -> None:
    here.train("plain")
    here.train("measured", task=_NEAR)
    assert here.digest("measured") == here.digest("plain")
    for kind in ("train", "validation"):
        plain, measured = here.entries(kind, "plain"), here.entries(kind, "measured")
        assert [entry["loss"] for entry in measured] == [entry["loss"] for entry in plain]
        assert all("near" in entry and "loss_near" not in entry for entry in measured)


def _near(here: Here, task: Tiny, run: str, part: str) -> float:
    """Return the share of near examples for the last weights, computed here."""
    inputs_N4, targets_N = getattr(task, f"{part}_dataset")(here.folder).tensors
    model = task.build_model().eval()
    model.load_state_dict(here.weights(run))
    return float(((model(inputs_N4) - targets_N).abs() < task.limit).double().mean())  # type: ignore[attr-defined]


def test_a_metric_is_the_mean_over_the_examples(here: Here) -> None:
    task = Rounded(limit=1.5)
    words = ("--lr", "1e-30", "--batch-size", "50", "--epochs", "1", "--set", "limit=1.5")
    out = here.succeeds(*_TRAIN, f"{__name__}:Rounded", *words)
    ((train,), (validation,)) = here.entries("train"), here.entries("validation")
    assert train["near"] == _near(here, task, "r", "train")
    assert validation["near"] == _near(here, task, "r", "validation")
    assert 0 < train["near"] < 1
    # The line of the epoch has both.
    line = f", near {validation['near']:.4f} (best); training near {train['near']:.4f}\n"
    assert line in out
    # An evaluation has intervals for the metric, too.
    out = here.succeeds("evaluate", "runs/r")
    assert re.search(rf"near +{validation['near']:.3g}  \[0\.", out), out


def test_a_metric_that_is_not_a_number_stops_nothing(here: Here) -> None:
    here.train(task=f"{__name__}:Undefined", epochs=1, checkpoint_steps=4)
    assert [entry["near"] for entry in here.entries("train")] == [None]


@pytest.mark.parametrize("names", [(), ("accuracy",)])
def test_a_classification_has_its_accuracy(names: tuple[str, ...]) -> None:
    class Sides(Classification):
        class_names = ("left", "right")
        train_metrics = names

    logits_B2 = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    losses = Sides().losses(nn.Identity(), (logits_B2, torch.tensor([0, 0, 0])))
    assert list(losses) == ["cross_entropy", *names]
    if names:
        assert losses["accuracy"].tolist() == [True, False, True]
