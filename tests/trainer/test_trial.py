"""Tasks that cannot keep the promise of the same bits are found out before the first step, and named."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.trainer.here import Here
from tests.trainer.tiny import Tiny
from trainer.errors import WrongUse

_OWN = numpy.random.default_rng(0)
_CURE = "draws random numbers from a generator of its own, or keeps a state"


def _noisy(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    inputs_B4, targets_B = batch
    return {"error": (model(inputs_B4) - targets_B + float(_OWN.normal())).square()}


def _dropping(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    """As much at random, from torch's generator."""
    inputs_B4, targets_B = batch
    return {"error": (model(inputs_B4) - targets_B + torch.randn(())).square()}


class _Rows(Dataset[Any]):
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)) + self.draw(), torch.tensor(1.0)


@pytest.mark.parametrize("fast", [False, True])
def test_losses_from_a_generator_of_its_own(here: Here, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(Tiny, "losses", _noisy)
    if fast:
        here.train(max_steps=2, deterministic=False)
        return
    with pytest.raises(WrongUse, match=f"task Tiny: the loss error differs when the same batch is computed again: it {_CURE}"):
        here.train(max_steps=2)
    assert not (here.path() / "checkpoints" / "step-00000002.pt").exists()


def test_losses_from_torchs_generator_are_fine_and_the_trial_leaves_no_trace(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tiny, "losses", _dropping)
    here.train("tried", max_steps=2)
    monkeypatch.setattr("trainer.session.try_task", lambda _job: None)
    here.train("untried", max_steps=2)
    assert here.digest("tried") == here.digest("untried")


def test_a_dataset_with_a_generator_of_its_own(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()
    draws = {"own": lambda: float(_OWN.normal()), "state": lambda: next(count), "seeded": numpy.random.normal}
    for name, draw in draws.items():
        monkeypatch.setattr(Tiny, "train_dataset", lambda _task, _place, draw=draw: _Rows(draw))
        if name == "seeded":
            here.train(name, max_steps=2, workers=0)
            continue
        with pytest.raises(WrongUse, match=f"task Tiny: training example 0 differs when it is read again: it {_CURE}"):
            here.train(name, max_steps=2, workers=0)


class _Noted(_Rows):
    """Writes down which process reads it."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with Path("readers").open("a") as readers:
            readers.write(f"{os.getpid()}\n")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_with_loader_workers_only_they_read_the_dataset(here: Here, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """A file that the training process opened would be shared by the workers, whose reads would move one another."""
    monkeypatch.setattr(Tiny, "train_dataset", lambda _task, _place: _Noted(lambda: 0.0))
    monkeypatch.setattr(Tiny, "validation_dataset", lambda _task, _place: _Noted(lambda: 0.0))
    here.train(max_steps=2, workers=workers)
    readers = set(map(int, Path("readers").read_text().split()))
    assert (os.getpid() in readers) == (workers == 0)
    assert len(readers) > workers
