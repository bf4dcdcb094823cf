"""State that checkpoints leave out: the rehearsal refuses it, and each digest a later change."""

import functools
import hashlib
import itertools
import random
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.support.here import Here, StopAfter
from tests.support.tiny import StepCounter, Tiny
from trainbox.contract.errors import Preempted, WrongUse
from trainer.checks.fingerprint import fingerprint
from trainer.checks.hidden_state import HiddenState
from trainer.system.sources import loaded_sources

_COUNT = 0
_GENERATOR = random.Random(0)  # noqa: S311


class _Note:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.count = 0


class _Slotted:
    """An object without `__dict__`."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class _Hook:
    """A hook with a state, which a module calls after each forward."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        pass


def _counter() -> Callable[[], int]:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return count

    return counted


def _numbers() -> Iterator[int]:
    yield from range(100)


def _add(numbers: list[int], number: int) -> None:
    numbers.append(number)


class _Stateful(StepCounter):
    """A model with attributes of each kind, which its forward does not change."""

    forwards_of_all = 0

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.ready = False
        self.name = "start"
        self.history: list[int] = []
        self.recent: deque[int] = deque(maxlen=3)
        self.seen = {"b", "a"}
        self.table = {"means": [torch.zeros(2)], "size": (1, 2)}
        self.array = numpy.zeros(3)
        self.generator = torch.Generator().manual_seed(0)
        self.numpys = numpy.random.default_rng(0)
        self.counter = itertools.count()
        self.note = _Note()
        self.slotted = _Slotted()
        self.closure = _counter()
        self.numbers = _numbers()
        self.partial = functools.partial(_add, [])
        self.linear.register_forward_hook(_Hook())
        self.hidden = [nn.Linear(1, 1)]
        self.vocabulary = dict.fromkeys(map(str, range(5000)), 0)


def _grow_note(model: _Stateful) -> None:
    model.note.count += 1


def _grow_hook(model: _Stateful) -> None:
    (hook,) = model.linear._forward_hooks.values()
    hook.count += 1  # type: ignore[attr-defined]


def _move_hidden(model: _Stateful) -> None:
    with torch.no_grad():
        model.hidden[0].weight.add_(1)


def _move_global() -> None:
    global _COUNT  # noqa: PLW0603
    _COUNT += 1


_MOVES: dict[str, Callable[[Tiny, Any], Any]] = {
    "scale from 1.0 to 2.0": lambda _task, model: setattr(model, "scale", 2.0),
    "ready from False to True": lambda _task, model: setattr(model, "ready", True),
    "name from 'start' to 'end'": lambda _task, model: setattr(model, "name", "end"),
    "history,": lambda _task, model: model.history.append(1),
    "recent,": lambda _task, model: model.recent.append(1),
    "seen,": lambda _task, model: model.seen.add("c"),
    "table,": lambda _task, model: model.table["means"][0].add_(1),
    "array,": lambda _task, model: model.array.__setitem__(0, 1),
    "generator, a random generator,": lambda _task, model: torch.rand(1, generator=model.generator),
    "numpys, a random generator,": lambda _task, model: model.numpys.normal(),
    "counter,": lambda _task, model: next(model.counter),
    "note,": lambda _task, model: _grow_note(model),
    "slotted,": lambda _task, model: setattr(model.slotted, "count", 1),
    "closure,": lambda _task, model: model.closure(),
    "numbers,": lambda _task, model: next(model.numbers),
    "partial,": lambda _task, model: model.partial(1),
    "linear.hook 0,": lambda _task, model: _grow_hook(model),
    "hidden,": lambda _task, model: _move_hidden(model),
    "vocabulary,": lambda _task, model: model.vocabulary.__setitem__("more", 1),
    "Tiny.state,": lambda task, _model: task.state.append(1),
    "_Stateful.forwards_of_all from 0 to 1": lambda _task, _model: setattr(
        _Stateful, "forwards_of_all", 1
    ),
    "tests.trainer.checks.test_hidden_state._COUNT from 0 to 1": lambda _task, _model: (
        _move_global()
    ),
    "tests.trainer.checks.test_hidden_state._GENERATOR, a random generator": lambda _task, _model: (
        _GENERATOR.random()
    ),
}


@pytest.fixture
def stateful(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_model(task: Tiny) -> nn.Module:
        vars(task)["state"] = []
        return _Stateful()

    monkeypatch.setattr(Tiny, "build_model", build_model)
    monkeypatch.setattr(_Stateful, "forwards_of_all", 0)
    monkeypatch.setitem(globals(), "_COUNT", 0)


def _moving(
    monkeypatch: pytest.MonkeyPatch, moves: list[Callable[[Tiny, Any], Any]], forward: int | None
) -> None:
    """Run the moves in the forward with the number `forward`, or in each forward."""
    plain = Tiny.losses

    def losses(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        found = plain(task, model, batch)
        if model.training and forward in (None, int(model.forwards)):
            for move in moves:
                move(task, model)
        return found

    monkeypatch.setattr(Tiny, "losses", losses)


@pytest.mark.usefixtures("stateful")
@pytest.mark.parametrize("text", _MOVES)
def test_an_attribute_that_changes_late_fails_the_run_at_the_next_digest(
    here: Here, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    _moving(monkeypatch, [_MOVES[text]], 5)
    with pytest.raises(WrongUse) as ended:
        here.train(max_steps=12)
    assert str(ended.value).startswith(f"task Tiny: by step 6 it has changed {text}")
    assert str(ended.value).endswith("or use --fast, which does not guarantee the same bits")
    assert here.steps() == []


@pytest.mark.usefixtures("stateful")
def test_no_checkpoint_is_saved_after_an_attribute_changes(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _moving(monkeypatch, [lambda _task, model: setattr(model, "scale", 2.0)], 3)
    with pytest.raises(
        WrongUse,
        match="by step 4 it has changed scale from 1.0 to 2.0, which checkpoints leave out",
    ):
        here.train(max_steps=12, checkpoint_steps=2)
    assert here.steps() == [2]


@pytest.mark.usefixtures("stateful")
@pytest.mark.parametrize("text", _MOVES)
def test_state_that_each_forward_changes_is_refused_before_step_1(
    here: Here, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    calls: dict[str, Callable[[Tiny, Any], Any]] = {
        "scale": lambda _task, model: setattr(model, "scale", model.scale + 1),
        "ready": lambda _task, model: setattr(model, "ready", not model.ready),
        "name": lambda _task, model: setattr(model, "name", model.name + "."),
        "recent,": lambda _task, model: model.recent.append(sum(model.recent) + 1),
        "seen,": lambda _task, model: model.seen.add(str(len(model.seen))),
        "array,": lambda _task, model: model.array.__iadd__(1),
        "slotted,": lambda _task, model: setattr(model.slotted, "count", model.slotted.count + 1),
        "vocabulary,": lambda _task, model: model.vocabulary.__setitem__(
            str(len(model.vocabulary)), 1
        ),
        "_Stateful.forwards_of_all": lambda _task, _model: setattr(
            _Stateful, "forwards_of_all", _Stateful.forwards_of_all + 1
        ),
    }
    name = text.partition(" ")[0]
    _moving(monkeypatch, [calls.get(name, _MOVES[text])], None)
    with pytest.raises(WrongUse) as refused:
        here.train(max_steps=12)
    assert str(refused.value).startswith(f"task Tiny: a resume would change {name}")
    assert str(refused.value).endswith("or use --fast, which does not guarantee the same bits")
    assert here.steps() == []
    assert not (here.path() / "rehearsal").exists()


@pytest.mark.usefixtures("stateful")
def test_fast_and_no_rehearsal_train_a_task_with_hidden_state(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _moving(monkeypatch, list(_MOVES.values()), None)
    out = here.train("fast", max_steps=3, deterministic=False)
    assert "\nrehearsal  1 step, a validation and a checkpoint in " in out
    assert "\nrehearsal  skipped\n" in here.train("skipped", max_steps=3, rehearses=False)
    assert here.steps("fast") == here.steps("skipped") == [3]


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


def _with_bank(monkeypatch: pytest.MonkeyPatch, moves: Callable[[_Bank], bool]) -> None:
    monkeypatch.setattr(_Bank, "moves", staticmethod(moves))
    monkeypatch.setattr(Tiny, "build_model", lambda _task: _Bank())


def test_large_tensors_are_not_copied() -> None:
    model = _Bank()
    model.table = numpy.zeros(2**23)  # 64 MiB
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracemalloc.start()
    fingerprint(Tiny(), model, optimizer, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_a_large_tensor_that_the_first_forward_fills_is_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_bank(monkeypatch, lambda model: not model.bank.any())
    with pytest.raises(WrongUse, match="a resume would change bank, which checkpoints leave out"):
        here.train(max_steps=12)
    assert here.steps() == []


@pytest.mark.parametrize("training", [True, False])
def test_a_large_tensor_that_each_forward_or_each_validation_fills_may_change(
    here: Here, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    _with_bank(monkeypatch, lambda model: model.training is training)
    here.train(max_steps=12)
    assert here.steps()[-1] == 12


def test_a_large_tensor_that_a_late_validation_changes_is_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_bank(monkeypatch, lambda model: not model.training and int(model.forwards) > 5)
    with pytest.raises(WrongUse, match="it has changed bank, which checkpoints leave out"):
        here.train(max_steps=18)


def test_all_processes_fail_if_an_attribute_changes_on_one() -> None:
    """Only the fingerprint of another process differs."""
    model = StepCounter()
    other = "scale, which checkpoints leave out"
    job: Any = SimpleNamespace(
        task=Tiny(),
        world=SimpleNamespace(from_each=lambda own: [own, other]),
        workers=1,
        state=SimpleNamespace(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            progress=SimpleNamespace(step=3),
        ),
        train=None,
        evaluation=SimpleNamespace(dataset=None),
    )
    with pytest.raises(WrongUse, match=f"task Tiny: by step 3 it has changed {other}"):
        HiddenState(job, ()).check()


class _ActNorm(StepCounter):
    """A model whose first forward sets a parameter from the data."""

    buffer = False

    def __init__(self) -> None:
        super().__init__()
        self.factor_4 = nn.Parameter(torch.ones(4))
        if self.buffer:
            self.register_buffer("ready", torch.tensor(False))
        else:
            self.ready = False  # type: ignore[assignment]

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if not self.ready:
            self.factor_4.data.copy_(1 / inputs_B4.std(0))
            self.ready = self.ready | True
        return super().forward(inputs_B4 * self.factor_4)


@pytest.mark.parametrize("buffer", [False, True])
def test_weights_that_the_first_forward_sets_from_the_data_are_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch, buffer: bool
) -> None:
    monkeypatch.setattr(_ActNorm, "buffer", buffer)
    monkeypatch.setattr(Tiny, "build_model", lambda _task: _ActNorm())
    with pytest.raises(
        WrongUse,
        match="task Tiny: a forward sets the trained parameter factor_4 .*: set it in build_model",
    ):
        here.train(max_steps=3)


def test_fast_sets_such_weights_in_the_first_step_and_not_in_the_rehearsal(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tiny, "build_model", lambda _task: _ActNorm())
    here.train("rehearsed", max_steps=3, deterministic=False)
    here.train("skipped", max_steps=3, deterministic=False, rehearses=False)
    assert here.digest("rehearsed") == here.digest("skipped")


class _Threshold(StepCounter):
    """A model that keeps a number of its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold: float | None = None

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if self.threshold is None:
            self.threshold = float(inputs_B4.max())
        return super().forward(inputs_B4.clamp(max=self.threshold))


def test_a_number_that_a_model_keeps_from_its_first_batch_is_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tiny, "build_model", lambda _task: _Threshold())
    with pytest.raises(WrongUse, match=r"task Tiny: a resume would change threshold from \d"):
        here.train(max_steps=3)


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
def test_attributes_that_each_forward_sets_may_change(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        inputs_B4, targets_B = batch
        vars(task)["last"] = inputs_B4.sum()
        return {"error": (model(inputs_B4) - targets_B).square()}

    monkeypatch.setattr(Tiny, "build_model", lambda _task: _Busy())
    monkeypatch.setattr(Tiny, "losses", losses)
    here.train("undisturbed", max_steps=14, shards=2, threads=1, digest_steps=1)
    with pytest.raises(Preempted):
        here.train(max_steps=14, shards=2, threads=1, digest_steps=1, stop=StopAfter(8))
    here.train(max_steps=14, shards=2, threads=1, digest_steps=1)
    assert here.digest() == here.digest("undisturbed")


def test_an_optimizers_attribute_outside_its_state_dict_is_reported(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            vars(self)["steps"] = self.steps + 1
            return super().step(closure)

    monkeypatch.setattr(
        Tiny, "build_optimizer", lambda _t, model, _n, rate, _w: Slow(model.parameters(), rate)
    )
    with pytest.raises(
        WrongUse,
        match="a resume would change optimizer.steps from 2 to 1, which checkpoints leave out",
    ):
        here.train(max_steps=3)


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
