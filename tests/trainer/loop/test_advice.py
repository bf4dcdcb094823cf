"""Advice about a training, in its header and at its end."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.support.here import Here
from tests.support.tiny import TINY, Tiny
from trainbox import Classification
from trainer.data.schedule import Schedule
from trainer.loop import report
from trainer.loop.advice import advice_after, advice_before

_NAMES = ("cat", "dog")


def _training(*losses: float, **other: float) -> list[dict[str, Any]]:
    return [
        {"kind": "train", "step": step, "loss": loss, **other}
        for step, loss in enumerate(losses, 1)
    ]


def _validation(confusion: list[list[int]], step: int = 8) -> dict[str, Any]:
    right = sum(row[index] for index, row in enumerate(confusion))
    accuracy = right / sum(map(sum, confusion))
    return {"kind": "validation", "step": step, "accuracy": accuracy, "confusion": confusion}


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ([1, 1, 1, 1, 1, 1, 1, 3, 3], "the training loss grew from 1 to 3: use a lower --lr"),
        ([1, 1, 9, 1, 1, 1, 1, 1, 1], ""),  # a spike
        ([1, 1, 1, 1, 1, 1, 1, 1.05, 1.05], ""),
        ([1, 3], ""),  # too few entries
        ([-3, -3, -3, -3, -1, -1, -1, -1], ""),  # a bound, whose zero means nothing
    ],
)
def test_a_loss_that_grew(losses: list[float], text: str) -> None:
    assert advice_after(_training(*losses), 1, ()) == ([text] if text else [])


def test_losses_with_several_parts_may_grow() -> None:
    """Such as the losses of a generator and a discriminator."""
    assert advice_after(_training(*range(1, 9), loss_generator=1.0), 1, ()) == []


@pytest.mark.parametrize(
    ("confusion", "is_chance"),
    [
        ([[6, 0], [4, 0]], True),
        ([[3, 3], [2, 2]], True),
        ([[5, 1], [1, 3]], False),
        ([[1, 5], [0, 10]], False),  # better, although the classes differ in size
    ],
)
def test_an_accuracy_no_better_than_one_answer(confusion: list[list[int]], is_chance: bool) -> None:
    found = advice_after([_validation(confusion)], 8, _NAMES)
    assert len(found) == is_chance
    assert all("of the answer 'cat' for all examples: check the labels" in line for line in found)


def test_a_training_of_less_than_an_epoch_is_not_judged() -> None:
    assert advice_after([_validation([[6, 0], [4, 0]])], 9, _NAMES) == []


class Chance(Classification):
    """Labels that have nothing to do with the inputs."""

    epochs: ClassVar[int] = 1
    batch_size: ClassVar[int] = 8
    class_names: ClassVar[tuple[str, ...]] = _NAMES

    def train_dataset(self, data_dir: Any) -> TensorDataset:
        return TensorDataset(torch.zeros(15, 4), torch.zeros(15, dtype=torch.int64))

    def validation_dataset(self, data_dir: Any) -> TensorDataset:
        return TensorDataset(torch.zeros(10, 4), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 1]))

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)


def test_a_training_prints_its_advice(here: Here) -> None:
    out = here.train(task=f"{__name__}:Chance", batch_size=8)
    begin, _, end = out.partition("\nbest ")
    assert (
        "note       each epoch leaves out its last, incomplete batch of 7 of 15 training "
        "examples: --batch-size 7 leaves out 1\n"
    ) in begin
    assert "note       the accuracy 0.6000 is no better than the accuracy 0.6000 of the" in end


class _Listed(nn.Module):
    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers, self.last = layers, nn.Linear(4, 1)


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ([nn.Linear(4, 4)], "nn.ModuleList"),
        ({"a": nn.Linear(4, 4)}, "nn.ModuleDict"),
        (nn.ModuleList([nn.Linear(4, 4)]), ""),
        ([4, "relu"], ""),
    ],
)
def test_modules_in_a_plain_list(layers: Any, kind: str) -> None:
    schedule = Schedule(0, 16, 8, 2, ())
    text = "the modules in _Listed.layers are neither trained nor saved: use "
    found = advice_before(schedule, nn.Sequential(_Listed(layers), _Listed(layers)))
    assert found == ([f"{text}{kind} if they should be"] if kind else [])


def test_a_good_training_prints_no_advice(here: Here) -> None:
    assert "note " not in here.train(batch_size=10)


def test_a_training_that_takes_long_has_its_curves_as_a_picture(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train("short")
    assert not (here.path("short") / "curves.png").exists()
    monkeypatch.setattr(report, "_DRAWN_AFTER_S", 0.0)
    assert "\ncurves     runs/long/curves.png\n" in here.train("long")
    assert (here.path("long") / "curves.png").read_bytes().startswith(b"\x89PNG")
    (here.path("full") / "curves.png").mkdir(parents=True)
    assert "runs/full/curves.png is missing: cannot write" in here.train("full")


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ("input", "example 13 of validation_dataset() has NaN"),
        ("loss", "the statistics of its examples 8 to 15 are NaN: check losses()"),
        ("metric", "check the validation data and metrics()"),
    ],
)
def test_a_validation_with_nan_names_the_example(here: Here, broken: str, text: str) -> None:
    inputs_N4, targets_N = torch.rand(20, 4), torch.rand(20)
    if broken == "input":
        inputs_N4[13, 2] = torch.nan
    of_model = Tiny.losses

    def losses(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
        found = of_model(task, model, batch)
        if broken == "loss" and not model.training and bool((batch[1] == targets_N[9]).any()):
            found["squared_error"] = found["squared_error"] * torch.nan
        return found

    here.plant(validation_dataset=lambda *_: TensorDataset(inputs_N4, targets_N), losses=losses)
    if broken == "metric":
        here.plant(metrics=lambda *_: {"loss": float("nan")})
    code, out, _ = here.command("train", TINY, "--device", "cpu", "--epochs", "1", "--run", "r")
    assert code == 6
    lines = [line for line in out.splitlines() if "of the validation is NaN" in line]
    assert lines == [
        "step 6: loss of the validation is NaN, so this checkpoint cannot be the best: " + text
    ]
