"""What follows a validation."""

import dataclasses
from typing import Any

import pytest

from tests.support.here import Here
from trainer.loop import validate


def test_a_training_ends_after_as_many_validations_without_progress_as_its_patience(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, evaluate = iter([3.0, 4.0, 2.0, 2.0, 3.0, 1.0]), validate.evaluate

    def evaluated(*arguments: Any, **named: Any) -> Any:
        result = evaluate(*arguments, **named)
        assert result is not None
        return dataclasses.replace(result, metrics={"loss": next(losses)})

    monkeypatch.setattr(validate, "evaluate", evaluated)
    here.train(epochs=6, early_stopping="min:loss", patience=2)
    assert [entry["loss"] for entry in here.entries("validation")] == [3, 4, 2, 2, 3]
    progress = here.state(30)["progress"]  # the last step has a checkpoint
    assert (progress["best_step"], progress["ended_early"]) == (18, True)
