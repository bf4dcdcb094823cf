"""State that checkpoints leave out: large tensors, attributes that each step sets, weights."""

import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.support.here import Here
from tests.support.tiny import ActNorm, StepCounter, Tiny
from trainbox.errors import WrongUse
from trainer.checks.hidden_state import HiddenState
from trainer.system.sources import loaded_sources


class _Bank(StepCounter):
    """A model with tensors above 4 MiB, which fills one of them when `moves` returns true."""

    moves: Callable[["_Bank"], bool] = staticmethod(lambda _model: False)

    def __init__(self) -> None:
        super().__init__()
        self.bank = torch.zeros(2**20 + 1)
        self.table = numpy.zeros(2**19 + 1)

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if type(self).moves(self):
            self.bank.fill_(float(inputs_B4.detach()[0, 0]))
        return super().forward(inputs_B4)


def _with_bank(here: Here, monkeypatch: pytest.MonkeyPatch, moves: Callable[[_Bank], bool]) -> None:
    monkeypatch.setattr(_Bank, "moves", staticmethod(moves))
    here.plant(build_model=lambda _task: _Bank())


def test_a_large_tensor_that_the_first_forward_fills_is_noted(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_bank(here, monkeypatch, lambda model: not model.bank.any())
    assert "note       _Bank.bank changed in a step" in here.train(max_steps=12)


@pytest.mark.parametrize("training", [True, False])
def test_a_large_tensor_that_each_forward_or_each_validation_fills_may_change(
    here: Here, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    _with_bank(here, monkeypatch, lambda model: model.training is training)
    assert "\nnote " not in here.train(max_steps=12)


def test_a_large_tensor_that_a_late_validation_changes_is_noted(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_bank(here, monkeypatch, lambda model: not model.training and int(model.forwards) > 5)
    assert "note: by step 6, _Bank.bank changed, which checkpoints" in here.train(max_steps=18)


def test_all_processes_note_an_attribute_that_changes_on_one(here: Here) -> None:
    model, noted, lines = StepCounter(), list[Any](), list[str]()
    job: Any = SimpleNamespace(
        task=Tiny(),
        world=SimpleNamespace(from_each=lambda own: [own, ["Net.scale"]]),
        workers=1,
        state=SimpleNamespace(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            progress=SimpleNamespace(step=3),
        ),
        run=SimpleNamespace(report=lines.append),
        train=None,
        evaluation=SimpleNamespace(dataset=None),
    )
    state = HiddenState(job, (), lambda names, step: noted.append((names, step)))
    state.check()
    state.check()
    assert noted[0] == (["Net.scale"], 3)
    assert lines[0].startswith("note: by step 3, Net.scale changed, which checkpoints leave out: ")


def _with_act_norm(here: Here, attribute: bool = False) -> None:
    model = functools.partial(ActNorm, attribute=attribute)
    here.plant(build_model=lambda _task: model())


def test_weights_that_the_first_forward_sets_from_the_data_resume(here: Here) -> None:
    _with_act_norm(here)
    here.train("whole", max_steps=9)
    here.stopped(4, "stopped", max_steps=9)
    here.train("stopped", max_steps=9)
    assert here.digest("stopped") == here.digest("whole")


def test_an_attribute_that_has_whether_they_are_set_is_refused(here: Here) -> None:
    _with_act_norm(here, attribute=True)
    with pytest.raises(WrongUse, match=r"after a resume, .* \(ActNorm\.ready\): make it a buffer"):
        here.train(max_steps=3)


def test_fast_sets_such_weights_in_the_first_step_and_not_in_the_rehearsal(here: Here) -> None:
    _with_act_norm(here, attribute=True)
    here.train("rehearsed", max_steps=3, deterministic=False)
    here.train("skipped", max_steps=3, deterministic=False, rehearses=False)
    assert here.digest("rehearsed") == here.digest("skipped")


class _Busy(nn.Module):
    """A model with attributes that each forward sets from its batch alone.

    Some modules of torch have such attributes too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.old_weight = torch.nn.utils.weight_norm(nn.Linear(4, 4))
        self.old_spectral = torch.nn.utils.spectral_norm(nn.Linear(4, 4))
        self.spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.weight = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))
        self.activation: Tensor | None = None
        self.masks: dict[int, Tensor] = {}
        self.warned = False
        self.shape: list[int] = []

    def forward(self, inputs_B4: Tensor) -> Tensor:
        self.warned = True
        self.shape = list(inputs_B4.shape)
        if len(inputs_B4) not in self.masks:
            self.masks[len(inputs_B4)] = torch.ones(len(inputs_B4), 1)
        hidden_B4 = self.norm(inputs_B4) * self.masks[len(inputs_B4)]
        hidden_B4 = self.attention(*[self.lstm(hidden_B4[None])[0]] * 3)[0][0]
        hidden_B4 = self.spectral(self.old_spectral(self.old_weight(hidden_B4)))
        self.graph = hidden_B4
        self.activation = hidden_B4.detach().clone()
        output_B: Tensor = self.weight(hidden_B4).squeeze(1)
        return output_B


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_attributes_that_each_forward_sets_may_change(here: Here) -> None:
    def losses(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        inputs_B4, targets_B = batch
        vars(task)["last"] = inputs_B4.sum()
        return {"error": (model(inputs_B4) - targets_B).square()}

    here.plant(build_model=lambda _task: _Busy(), losses=losses)
    here.train("undisturbed", max_steps=14, shards=2, threads=1, digest_steps=1)
    here.stopped(8, max_steps=14, shards=2, threads=1, digest_steps=1)
    here.train(max_steps=14, shards=2, threads=1, digest_steps=1)
    assert here.digest() == here.digest("undisturbed")


def test_a_users_module_that_replaces_a_library_is_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries are cached by module, not by name, because each digest skips thousands of them."""
    library, users = ModuleType("just_loaded"), ModuleType("just_loaded")
    library.__file__, users.__file__ = numpy.__file__, str(tmp_path / "just_loaded.py")
    (tmp_path / "just_loaded.py").touch()
    monkeypatch.setitem(sys.modules, "just_loaded", library)
    assert "just_loaded" not in loaded_sources()
    monkeypatch.setitem(sys.modules, "just_loaded", users)
    assert [loaded_sources()["just_loaded"] for _ in range(2)] == 2 * [
        hashlib.sha256(b"").hexdigest()
    ]
