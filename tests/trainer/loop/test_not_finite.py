"""A loss that is not finite: exit code 6, with its cause in the data if that is found."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from tests.support.here import Here
from tests.support.tiny import TINY, Tiny
from trainbox.errors import Failure

_BAD = 17


def _with_a_bad_example(value: float) -> TensorDataset:
    dataset = Tiny().train_dataset(Path())
    assert isinstance(dataset, TensorDataset)
    inputs_N4, targets_N = (tensor.clone() for tensor in dataset.tensors)
    inputs_N4[_BAD, 2] = value
    return TensorDataset(inputs_N4, targets_N)


@pytest.mark.parametrize(("value", "read"), [(math.nan, False), (-math.inf, True)])
def test_a_bad_number_of_an_example_is_named(here: Here, value: float, read: bool) -> None:
    dataset: Dataset[Any] = _with_a_bad_example(value)
    if read:  # one by one
        dataset = Subset(dataset, range(50))
    here.plant(train_dataset=lambda *_: dataset)
    err = here.refused("train", TINY, "--device", "cpu", "--run", "r", "--workers", "0", code=6)
    assert f": example {_BAD} of the training set has a number that is infinite or NaN: " in err
    assert "--lr" not in err


def test_the_rehearsal_names_an_example_before_it_saves_weights_that_are_not_finite(
    here: Here,
) -> None:
    here.rehearses = True
    inputs_N4, targets_N = Tiny().train_dataset(Path()).tensors
    dataset = TensorDataset(inputs_N4 * math.nan, targets_N)
    here.plant(train_dataset=lambda *_: dataset)
    err = here.refused("train", TINY, "--device", "cpu", "--run", "r", code=6)
    remedy = "of the training set has a number that is infinite or NaN: repair it"
    assert re.search(rf"by step 2: example \d+ {remedy}$", err)


def test_a_rate_that_is_too_high_is_named_with_the_best_checkpoint(here: Here) -> None:
    losses = Tiny.losses

    def explode(task: Tiny, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        factor = math.inf if here.entries("validation") else 1.0
        return {name: loss * factor for name, loss in losses(task, model, batch).items()}

    here.plant(losses=explode)
    words = ("--epochs", "2", "--log-steps", "1", "--no-rehearsal")
    err = here.refused("train", TINY, "--device", "cpu", "--run", "r", *words, code=6)
    assert "is not finite by step " in err
    assert ": lower --lr, add --warmup-epochs or --clip-norm, or use --precision fp32; " in err
    assert (
        f"earlier checkpoints are valid (best: step {here.entries('validation')[0]['step']})" in err
    )


def test_a_training_whose_validations_are_all_nan_fails_at_its_end(here: Here) -> None:
    dataset = _with_a_bad_example(math.nan)
    here.plant(validation_dataset=lambda *_: dataset)
    words = ("train", TINY, "--device", "cpu", "--run", "r")
    code, out, err = here.command(*words)
    assert code == 6
    assert "loss of the validation is NaN, so this checkpoint cannot be the best: example" in out
    assert "each validation had NaN as the metric that selects the best checkpoint (" in err
    assert "check the validation data and metrics(); the last checkpoint is valid" in err
    assert here.command("evaluate", str(here.path()), "--device", "cpu")[2].endswith(
        "or only with NaN as the metric: wait for a validation, or use --checkpoint last\n"
    )


def test_a_rehearsal_that_diverges_does_not_promise_a_checkpoint(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its best step has a checkpoint only until its end."""
    losses = Tiny.losses

    def explode(task: Tiny, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        found = losses(task, model, batch)
        factor = math.inf if model.training and model.forwards >= 2 else 1.0
        return {name: loss * factor for name, loss in found.items()}

    monkeypatch.setattr(Tiny, "losses", explode)
    here.rehearses = True
    err = here.refused("train", TINY, "--device", "cpu", "--run", "r", code=6)
    assert "is not finite by step 2: lower --lr" in err and "valid" not in err
    assert list(Path("runs/r").glob("checkpoints/*")) == []


@pytest.mark.parametrize(
    ("compute", "found"),
    [
        (lambda error_B, targets_B: error_B + (targets_B * 0).log(), "the loss error of example"),
        (lambda error_B, targets_B: error_B / (targets_B - targets_B), "the loss error of example"),
        (lambda error_B, _targets_B: (error_B * 0).sqrt(), "the gradient of linear.weight was"),
    ],
)
def test_what_is_not_finite_before_the_first_update_is_named(
    here: Here, compute: Any, found: str
) -> None:
    """The learning rate cannot be the cause."""
    losses = Tiny.losses
    here.plant(
        losses=lambda task, model, batch: {
            "watched": torch.full((len(batch[1]),), torch.inf),  # nothing is trained with it
            "error": compute(losses(task, model, batch)["squared_error"], batch[1]),
        }
    )
    for words in ((), ("--no-rehearsal", "--shards", "2")):
        err = here.refused("train", TINY, "--device", "cpu", "--run", "r", *words, code=6)
        assert f": {found} " in err and "was so before the first update: check the first" in err
        assert "--lr" not in err


def test_a_first_step_that_was_skipped_is_not_the_cause_of_a_later_loss(here: Here) -> None:
    losses = Tiny.losses

    def broken(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
        loss_B = losses(task, model, batch)["squared_error"]
        is_bad = model.training and int(model.forwards) in (1, 5, 6)
        return {"error": loss_B * torch.nan if is_bad else loss_B}

    here.plant(losses=broken)
    with pytest.raises(Failure, match="2 steps in a row .*: lower --lr"):
        here.train(skip_nonfinite=1)
