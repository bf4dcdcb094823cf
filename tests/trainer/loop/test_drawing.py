"""Pictures that a thread draws while the training continues."""

import functools
import io
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.support.here import Here, board_of
from tests.support.tiny import StepCounter, Tiny
from trainbox.errors import Failure
from trainer.records import tensorboard

_PICTURE = torch.zeros(3, 4, 4, dtype=torch.uint8)
_REUSED = torch.zeros(3, 4, 4, dtype=torch.uint8)
_trained_on, _drawn = threading.Event(), list[bool]()


def _in_thread() -> bool:
    """Return whether this is not the rehearsal, which draws in the training's thread."""
    return threading.current_thread() is not threading.main_thread()


@dataclass(frozen=True)
class Patient(Tiny):
    """Draws until the training has done a step after the validation."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        losses = super().losses(model, batch)
        assert isinstance(model, StepCounter)
        if model.training and int(model.forwards) > 6:
            _trained_on.set()
        return losses

    def figures(
        self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]
    ) -> dict[str, Callable[[], Tensor]]:
        def draw() -> Tensor:
            if _in_thread():
                _drawn.append(_trained_on.wait(60) and not torch.is_grad_enabled())
            return _PICTURE

        return {"curve": draw}


@dataclass(frozen=True)
class Reusing(Patient):
    """Writes each batch's picture into the same tensor."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if torch.is_grad_enabled():
            _REUSED.zero_()
        return super().losses(model, batch)

    def figures(self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]) -> dict[str, Any]:
        return {**super().figures(model, batch, totals), "reused": _REUSED.fill_(200)}


@dataclass(frozen=True)
class Failing(Tiny):
    """Raises an error while it draws in a thread."""

    def figures(
        self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]
    ) -> dict[str, Callable[[], Tensor]]:
        def draw() -> Tensor:
            if _in_thread():
                raise ValueError("no room")
            return _PICTURE

        return {"curve": draw}


def _steps_of_pictures(here: Here) -> list[int]:
    board = board_of(here.path())
    return [event.step for event in board.Images("validation/curve")]


def test_the_training_continues_while_a_thread_draws(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "_PICTURES_EVERY_S", 0.0)
    monkeypatch.setattr(tensorboard, "_MOST_SHARE", 1.0)
    _trained_on.clear()
    _drawn.clear()
    here.train(task=f"{__name__}:Patient")
    assert _drawn == [True, True, True]
    assert _steps_of_pictures(here) == [6, 12, 18]


def test_pictures_that_follow_soon_are_drawn_only_for_the_best_and_the_last_step(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([5.0, 4.0, 3.0, 4.0, 4.0])
    here.plant(metrics=lambda *_: {"loss": next(losses)})
    monkeypatch.setattr(tensorboard, "_PICTURES_EVERY_S", 3600.0)
    _trained_on.set()
    here.train(task=f"{__name__}:Patient", epochs=5)
    assert _steps_of_pictures(here) == [6, 18, 30]


def test_a_picture_is_not_what_the_task_makes_of_it_later(here: Here) -> None:
    _trained_on.clear()
    here.train(task=f"{__name__}:Reusing", epochs=2)
    board = board_of(here.path())
    event, _last = board.Images("validation/reused")
    picture = Image.open(io.BytesIO(event.encoded_image_string))
    assert picture.getextrema() == ((200, 200),) * 3


def test_a_stop_waits_for_the_drawing(here: Here) -> None:
    _trained_on.clear()
    here.stopped(7, task=f"{__name__}:Patient")
    assert _steps_of_pictures(here) == [6]


@pytest.mark.parametrize(("epochs", "steps"), [(1, [6]), (3, [6, 12])])
def test_an_error_of_a_drawing_ends_the_training(here: Here, epochs: int, steps: list[int]) -> None:
    """It is raised before the next pictures, or at the end."""
    with pytest.raises(Failure, match=r"task Failing: figures\(\) raised ValueError: no room \("):
        here.train(task=f"{__name__}:Failing", epochs=epochs)
    assert here.steps() == steps


def test_an_error_of_a_drawing_does_not_hide_a_stop(here: Here) -> None:
    here.stopped(7, task=f"{__name__}:Failing")
    log = (here.path() / "logs/rank-0.log").read_text()
    assert "pictures of step 6 are missing, because figures() raised ValueError: no room\n" in log


def test_a_stop_begins_no_other_drawing(tmp_path: Path) -> None:
    drawn = list[int]()

    def draw(step: int) -> dict[str, Tensor]:
        drawn.append(step)
        return {}

    board = tensorboard.TensorBoardLog(tmp_path, pytest.fail)
    board.begin(1)
    for step in (1, 2):
        board.wait_for_pictures()
        board.pictures(step, False, functools.partial(draw, step))
    board.close()
    assert drawn == [1]
