"""Families of hidden state: the rehearsal refuses each before step 1, if each forward changes it.

They do not change the bits of any step, so only the fingerprint finds them.
"""

import collections
import contextvars
import ctypes
import functools
import importlib
import itertools
import os
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.support.here import Here
from tests.support.tiny import StepCounter, Tiny
from trainbox.contract.errors import WrongUse
from trainer.checks.fingerprint import fingerprint
from trainer.checks.hidden_state import described, differing

_HERE = "tests.trainer.checks.test_families"
_COUNT = 0
_FITTED: Tensor | None = None
_GENERATOR = random.Random(0)  # noqa: S311
_LOCAL = threading.local()
_CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("_CONTEXT", default=0)


class _Elsewhere:
    """A class that is neither the task's nor the model's."""

    total = 0


class _Note:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.count, self.me, self.lock = 0, self, threading.Lock()

    def __call__(self, *_: object) -> None:
        """Be a hook with a state."""


class _Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class _Reducing(_Note):
    """Hides its state from pickle."""

    def __reduce__(self) -> Any:
        return _Reducing, ()


class _Stateless(_Note):
    def __getstate__(self) -> object:
        return {}


class _Dict(dict[str, int]):
    pass


def _counter() -> Callable[..., None]:
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        if not _:  # a hook gets arguments
            count += 1

    return counted


def _wrapping() -> Callable[..., Any]:
    """Return a function with a state, which a decorator gives the name of one of torch."""
    state = {"count": 0}

    @functools.wraps(nn.functional.relu)
    def wrapped(*_: object) -> dict[str, int]:
        return state

    return wrapped


class _Structure(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int)]


class _Matrix(numpy.ndarray):  # type: ignore[type-arg]
    pass


class _Torchs(torch.Generator):
    pass


class _SlottedLayer(nn.Linear):
    __slots__ = ("count",)

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.count = 0


def _delegating() -> Iterator[int]:
    yield from range(100)


def _made() -> type:
    class Made:
        count = 0

    return Made


def _appending(to: list[int] = []) -> None:  # noqa: B006
    to.append(1)


def _plain() -> None:
    pass


class _Stateful(StepCounter):
    """A model with attributes of each family, which its forward does not change."""

    total = 0

    class Settings:
        rate = 0

    @staticmethod
    def appended(to: list[int] = []) -> None:  # noqa: B006
        to.append(1)

    def __init__(self) -> None:
        super().__init__()
        numbers = list(range(50))
        self.number, self.text = 1.0, ""
        self.list, self.deque = [0], collections.deque([0], maxlen=3)
        self.set, self.dict, self.own_dict = {"b", "a"}, dict.fromkeys(numbers, 0), _Dict(a=0)
        self.nested = {"means": [torch.zeros(2)], "size": (1, 2)}
        self.array, self.objects = numpy.zeros(3), numpy.array([[0], 1], dtype=object)
        self.view, self.c_array = memoryview(bytearray(1)), (ctypes.c_int * 1)()
        self.queue = queue.Queue[int]()
        self.torchs = torch.Generator().manual_seed(0)
        self.numpys, self.pythons = numpy.random.default_rng(0), random.Random(0)  # noqa: S311
        self.counter, self.cycle = itertools.count(), itertools.cycle(numbers)
        self.listed, self.delegating = iter(numbers), _delegating()
        self.expression = (number for number in numbers)
        self.object, self.slotted = _Note(), _Slotted()
        self.reducing, self.stateless = _Reducing(), _Stateless()
        self.made = _made()
        self.key = _Note()
        self.weak = weakref.WeakKeyDictionary({self.key: 0})
        self.reference, self.proxy = weakref.ref(_ALIVE), weakref.proxy(self.key)
        self.closure, self.partial = _counter(), functools.partial(list.append, [])
        self.method, self.functions = _Note().__call__, [lambda: None]
        self.draw = random.Random(0).random  # noqa: S311
        self.wrapped, self.switch = _wrapping(), [lambda: 1, lambda: 2]
        self.read_only = types.MappingProxyType({"a": [0]})
        self.module = types.ModuleType("made")
        self.structure, self.matrix = _Structure(), numpy.zeros(1).view(_Matrix)
        self.own_torchs, self.of_made = _Torchs(), _made()()
        self.slotted_layer = _SlottedLayer()
        self.twins = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.__dict__["average"] = nn.Linear(4, 1)
        self.frozen, self.activation = nn.Linear(1, 1).requires_grad_(False), nn.ReLU()
        self.inner = torch.optim.SGD([torch.zeros(1)], 0.1)
        self.sparse, self.leaf = torch.eye(2).to_sparse(), torch.zeros(1, requires_grad=True)
        self.register_buffer("loose", torch.zeros(2), persistent=False)
        for tensor in (self.linear.weight, self.forwards):
            tensor.count = 0  # type: ignore[attr-defined]
        self.hooks = [_counter() for _ in range(3)]
        self.linear.register_forward_hook(self.hooks[0])
        self.linear.weight.register_hook(self.hooks[1])  # type: ignore[no-untyped-call]
        self.linear.bias.register_post_accumulate_grad_hook(self.hooks[2])  # type: ignore[no-untyped-call]
        _HOOKS[:] = self.__dict__.pop("hooks")


_ALIVE = _Note()
_HOOKS: list[Callable[..., None]] = []


def _grow(owner: Any, name: str = "count") -> None:
    setattr(owner, name, getattr(owner, name, 0) + 1)


def _add_one(module: nn.Linear) -> None:
    with torch.no_grad():
        module.weight.add_(1)


def _grow_global() -> None:
    global _COUNT  # noqa: PLW0603
    _COUNT += 1


def _replace(model: Any) -> None:
    model.activation = nn.Tanh() if isinstance(model.activation, nn.ReLU) else nn.ReLU()


def _exchange(model: Any) -> None:
    model.twins[0].weight, model.twins[1].weight = model.twins[1].weight, model.twins[0].weight


def _reorder(model: Any) -> None:
    first = next(iter(model._modules))
    model._modules[first] = model._modules.pop(first)


def _tie(model: Any) -> None:
    one, other = model.twins[0].bias, model.twins[1].bias
    shares = one.data_ptr() == other.data_ptr()
    other.data = other.data.clone() if shares else one.data


def _move(parameter: nn.Parameter) -> None:
    """Store a matrix of one row under other strides."""
    row, column = parameter.stride()
    parameter.data = parameter.data.as_strided(parameter.shape, (row + 1, column))


def _in_environment() -> None:
    os.environ["_FAMILIES"] = os.environ.get("_FAMILIES", "") + "."


# The name in the message, with a note after "@", and the change.
_FAMILIES: dict[str, Callable[[Tiny, Any], Any]] = {
    # Values
    "number": lambda _, model: _grow(model, "number"),
    "text": lambda _, model: setattr(model, "text", model.text + "."),
    # Containers
    "list": lambda _, model: model.list.append(1),
    "deque": lambda _, model: model.deque.append(sum(model.deque) + 1),
    "set": lambda _, model: model.set.add(str(len(model.set))),
    "dict": lambda _, model: model.dict.__setitem__(len(model.dict), 1),
    "own_dict": lambda _, model: model.own_dict.__setitem__("a", model.own_dict["a"] + 1),
    "nested": lambda _, model: model.nested["means"][0].add_(1),
    "array": lambda _, model: model.array.__iadd__(1),
    "objects": lambda _, model: model.objects[0].append(1),
    "view": lambda _, model: model.view.__setitem__(0, model.view[0] + 1),
    "c_array": lambda _, model: model.c_array.__setitem__(0, model.c_array[0] + 1),
    "queue": lambda _, model: model.queue.put(1),
    # Random generators
    "torchs, a random generator": lambda _, model: torch.rand(1, generator=model.torchs),
    "numpys, a random generator": lambda _, model: model.numpys.normal(),
    "pythons, a random generator": lambda _, model: model.pythons.random(),
    f"{_HERE}._GENERATOR, a random generator": lambda _, _model: _GENERATOR.random(),
    # Iterators and generators
    "counter": lambda _, model: next(model.counter),
    "cycle": lambda _, model: next(model.cycle),
    "listed": lambda _, model: next(model.listed),
    "delegating": lambda _, model: next(model.delegating),
    "expression": lambda _, model: next(model.expression),
    # Objects and classes
    "object": lambda _, model: _grow(model.object),
    "slotted": lambda _, model: _grow(model.slotted),
    "reducing": lambda _, model: _grow(model.reducing),
    "stateless": lambda _, model: _grow(model.stateless),
    "made": lambda _, model: _grow(model.made),
    "weak": lambda _, model: model.weak.__setitem__(model.key, model.weak[model.key] + 1),
    "reference": lambda _, _model: _grow(_ALIVE),
    "key": lambda _, model: _grow(model.proxy),
    f"{_HERE}._Stateful.total": lambda _, _model: _grow(_Stateful, "total"),
    f"{_HERE}._Elsewhere.total": lambda _, _model: _grow(_Elsewhere, "total"),
    f"{_HERE}._Stateful.Settings": lambda _, _model: _grow(_Stateful.Settings, "rate"),
    # Functions
    f"{_HERE}._Stateful.appended": lambda _, _model: _Stateful.appended(),
    "closure": lambda _, model: model.closure(),
    "partial": lambda _, model: model.partial(1),
    "method": lambda _, model: _grow(model.method.__self__),
    "draw": lambda _, model: model.draw(),
    "functions": lambda _, model: _grow(model.functions[0]),
    f"{_HERE}._plain": lambda _, _model: _grow(_plain),
    f"{_HERE}._appending": lambda _, _model: _appending(),
    "wrapped": lambda _, model: model.wrapped().update(count=model.wrapped()["count"] + 1),
    "switch": lambda _, model: model.switch.reverse(),
    # Subclasses of a user, and objects of classes in functions
    "structure": lambda _, model: _grow(model.structure),
    "matrix": lambda _, model: _grow(model.matrix),
    "own_torchs, a random generator": lambda _, model: _grow(model.own_torchs),
    "of_made": lambda _, model: _grow(type(model.of_made)),
    # Modules of Python, threads, and the process
    "read_only": lambda _, model: model.read_only["a"].append(1),
    "module": lambda _, model: _grow(model.module),
    f"{_HERE}._COUNT": lambda _, _model: _grow_global(),
    f"{_HERE}._LOCAL": lambda _, _model: _grow(_LOCAL),
    f"{_HERE}._CONTEXT": lambda _, _model: _CONTEXT.set(_CONTEXT.get() + 1),
    "the environment": lambda _, _model: _in_environment(),
    # Modules of torch, tensors and hooks
    "slotted_layer.count": lambda _, model: _grow(model.slotted_layer),
    "the parameters of the optimizer": lambda _, model: _exchange(model),
    "the order of the modules": lambda _, model: _reorder(model),
    "the tensors that share memory": lambda _, model: _tie(model),
    "linear.weight.attributes@layout": lambda _, model: _move(model.linear.weight),
    "average": lambda _, model: _add_one(model.average),
    "activation.__class__": lambda _, model: _replace(model),
    "inner": lambda _, model: model.inner.param_groups[0].update(
        lr=model.inner.param_groups[0]["lr"] + 1
    ),
    "sparse": lambda _, model: setattr(model, "sparse", model.sparse * 2),
    "leaf": lambda _, model: model.leaf.sum().backward(),
    "loose": lambda _, model: model.loose.add_(1),
    "linear.weight.attributes@own": lambda _, model: _grow(model.linear.weight),
    "linear.hook@forward": lambda _, _model: _HOOKS[0](),
    "linear.weight.attributes@gradient hook": lambda _, _model: _HOOKS[1](),
    "linear.bias.attributes@accumulate hook": lambda _, _model: _HOOKS[2](),
    # The task
    "Tiny.calls": lambda task, _model: vars(task).update(calls=vars(task).get("calls", 0) + 1),
}


@pytest.fixture(autouse=True)
def stateful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tiny, "build_model", lambda _task: _Stateful())
    monkeypatch.delenv("_FAMILIES", raising=False)


def _in_losses(monkeypatch: pytest.MonkeyPatch, act: Callable[[Tiny, Any], object]) -> None:
    """Call `act` with the task and the model before the losses of each batch."""
    plain = Tiny.losses

    def losses(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        act(task, model)
        return plain(task, model, batch)

    monkeypatch.setattr(Tiny, "losses", losses)


def _changing(monkeypatch: pytest.MonkeyPatch, families: Callable[[int], Collection[str]]) -> None:
    """Change the state of `families(n)` in training forward n, from 0."""

    def change(task: Tiny, model: Any) -> None:
        for family in families(int(model.forwards)) if model.training else ():
            _FAMILIES[family](task, model)

    _in_losses(monkeypatch, change)


@pytest.mark.parametrize("family", _FAMILIES)
def test_the_fingerprint_names_state_that_changes(here: Here, family: str) -> None:
    task, model = Tiny(), _Stateful()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fingerprint(task, model, optimizer, {})  # gives some objects their attributes
    before = fingerprint(task, model, optimizer, {})
    _FAMILIES[family](task, model)
    after = fingerprint(task, model, optimizer, {})
    first = min(differing(before, after))
    assert described(first, before, after).startswith(family.partition("@")[0])


@pytest.mark.parametrize("family", ["number", f"{_HERE}._COUNT"])
def test_state_that_each_forward_changes_is_refused_before_step_1(
    here: Here, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    _changing(monkeypatch, lambda _forwards: [family])
    with pytest.raises(WrongUse) as refused:
        here.train(max_steps=12)
    assert str(refused.value).startswith(f"task Tiny: a resume would change {family}")
    assert ", which checkpoints leave out: " in str(refused.value)
    assert here.steps() == []
    assert not (here.path() / "rehearsal").exists()


def test_a_model_with_such_attributes_trains_if_none_changes(here: Here) -> None:
    here.train(max_steps=2)
    assert here.steps() == [2]


def test_state_that_changes_later_fails_the_run_at_the_next_digest(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = "Tiny.calls"
    _changing(monkeypatch, lambda forwards: [family] if forwards == 4 else [])
    with pytest.raises(WrongUse, match=f"by step 6 it has changed {family}.*, which check"):
        here.train(max_steps=12)
    assert here.steps() == []


def test_weights_that_are_unfrozen_late_fail_the_run(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _in_losses(monkeypatch, lambda _, model: model.frozen.requires_grad_(int(model.forwards) > 4))
    with pytest.raises(WrongUse, match="it has changed frozen.bias.attributes, such as requires"):
        here.train(max_steps=12)


def test_the_mode_of_a_module_ends_with_the_step(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_mode(_task: Tiny, model: Any) -> None:
        if model.training:
            assert model.activation.training
            model.activation.eval()

    _in_losses(monkeypatch, end_mode)
    here.train(max_steps=12)


def test_no_checkpoint_is_saved_after_state_has_changed(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _changing(monkeypatch, lambda forwards: ["text"] if forwards == 2 else [])
    with pytest.raises(WrongUse, match="by step 4 it has changed text from '' to '.', which check"):
        here.train(max_steps=12, checkpoint_steps=2)
    assert here.steps() == [2]


def test_fast_and_no_rehearsal_train_a_task_with_hidden_state(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _changing(monkeypatch, lambda _forwards: _FAMILIES)
    out = here.train("fast", max_steps=3, deterministic=False)
    assert "\nrehearsal  1 step, a validation and a checkpoint in " in out
    assert "\nrehearsal  skipped\n" in here.train("skipped", max_steps=3, rehearses=False)
    assert here.steps("fast") == here.steps("skipped") == [3]


@pytest.mark.parametrize("method", ["prepare", "finished", "metrics", "figures"])
def test_a_method_that_counts_is_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    plain = getattr(Tiny, method)

    def counted(task: Tiny, *arguments: Any, **options: Any) -> Any:
        vars(task)["calls"] = vars(task).get("calls", 0) + 1
        return plain(task, *arguments, **options)

    monkeypatch.setattr(Tiny, "calls", 0, raising=False)  # the default of the attribute
    monkeypatch.setattr(Tiny, method, counted)
    with pytest.raises(WrongUse, match="a resume would change Tiny.calls from . to .,"):
        here.train(max_steps=12)


def test_a_variable_that_only_the_first_job_sets_is_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All jobs of a process share it, but a resume would set it from another batch."""
    plain = Tiny.losses

    def losses(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        global _FITTED  # noqa: PLW0603
        if _FITTED is None:
            _FITTED = batch[0].mean()
        return plain(task, model, (batch[0] - _FITTED, batch[1]))

    monkeypatch.setattr(Tiny, "losses", losses)
    monkeypatch.setitem(globals(), "_FITTED", None)
    with pytest.raises(WrongUse, match=f"a resume could change {_HERE}._FITTED, which checkpoin"):
        here.train(max_steps=2)


def test_a_teacher_outside_checkpoints_that_follows_before_the_step_is_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In step 1 it is equal to the weights, so a new model has the same teacher."""

    def follow(_task: Tiny, model: Any) -> None:
        if model.training:
            model.__dict__["average"].weight.data.lerp_(model.linear.weight.data, 0.1)

    def build_model(_task: Tiny) -> nn.Module:
        model = _Stateful()
        model.__dict__["average"].load_state_dict(model.linear.state_dict())
        return model

    monkeypatch.setattr(Tiny, "build_model", build_model)
    _in_losses(monkeypatch, follow)
    with pytest.raises(WrongUse, match="a resume could change average, which checkpoints leave"):
        here.train(max_steps=2)


class _Phased(StepCounter):
    """A model whose phase changes late, and is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"phase": self.phase}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.phase = state["phase"]

    def forward(self, inputs_B4: Tensor) -> Tensor:
        self.phase = 0.5 if int(self.forwards) > 5 else self.phase
        return self.phase * super().forward(inputs_B4)


def test_extra_state_may_change_late(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tiny, "build_model", lambda _task: _Phased())
    here.train(max_steps=12)
    assert here.steps()[-1] == 12


def test_a_module_of_the_user_may_be_imported_late(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("late_module.py").write_text("class Plotter:\n    color = 'red'\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))

    def import_late(_task: Tiny, model: Any) -> None:
        if int(model.forwards) > 5:
            importlib.import_module("late_module")

    _in_losses(monkeypatch, import_late)
    here.train(max_steps=12)
    assert here.steps()[-1] == 12
    del sys.modules["late_module"]


def _lookahead(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    slow, count = [parameter.detach().clone() for parameter in model.parameters()], 0

    def hook(*_: object) -> None:
        nonlocal count
        count += 1
        for mean, parameter in zip(slow, model.parameters(), strict=True):
            if count % 5 == 0:
                parameter.data.copy_(mean.lerp_(parameter.data, 0.5))

    optimizer.register_step_post_hook(hook)


def _attribute(optimizer: torch.optim.Optimizer, _model: nn.Module) -> None:
    optimizer.register_step_pre_hook(lambda *_: _grow(optimizer))


@pytest.mark.parametrize("plant", [_lookahead, _attribute])
def test_an_optimizer_with_a_state_of_its_own_is_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None]
) -> None:
    def build_optimizer(_task: Tiny, model: nn.Module, *_: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plant(optimizer, model)
        return optimizer

    monkeypatch.setattr(Tiny, "build_optimizer", build_optimizer)
    with pytest.raises(WrongUse, match="a resume would change optimizer[.]"):
        here.train(max_steps=12)


def test_two_optimizers_are_compared_each(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    late = False

    class Counting(torch.optim.AdamW):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += late
            return super().step(closure)

    def build_optimizer(_task: Tiny, model: Any, *_: Any) -> Any:
        weight, bias = model.linear.parameters()
        return torch.optim.AdamW([weight], 0.1), Counting([bias], 0.1)

    monkeypatch.setattr(Tiny, "build_optimizer", build_optimizer)
    here.train("plain", max_steps=2)
    late = True
    with pytest.raises(WrongUse, match=r"a resume would change optimizer\.1\.steps from 2 to 1,"):
        here.train("late", max_steps=2)


def test_sets_of_objects_that_refer_to_each_other_are_read_once(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_model(_task: Tiny) -> nn.Module:
        model = _Stateful()
        notes = [_Note() for _ in range(12)]
        for note in notes:
            note.near = set(notes)  # type: ignore[attr-defined]
        model.dict["notes"] = notes  # type: ignore[index, assignment]
        return model

    monkeypatch.setattr(Tiny, "build_model", build_model)
    here.train(max_steps=2)
    assert here.steps() == [2]


def test_a_model_that_cannot_be_saved_is_refused_before_step_1(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_model(_task: Tiny) -> nn.Module:
        model = StepCounter()
        model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
        return model

    monkeypatch.setattr(Tiny, "build_model", build_model)
    with pytest.raises(WrongUse, match=r"a tensor of type torch\.complex128, which model\.safete"):
        here.train(max_steps=2)


class _Rows(Dataset[Any]):
    """A dataset that changes its state when it is read, and not its examples."""

    def __init__(self, kind: str) -> None:
        self.kind, self.count = kind, 0
        self.torchs = torch.Generator()

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        changes: dict[str, Callable[[], Any]] = {
            "count": lambda: _grow(self),
            "torchs": lambda: torch.rand(1, generator=self.torchs),
        }
        changes[self.kind]()
        return torch.full((4,), float(index)), torch.tensor(1.0)


@pytest.mark.parametrize("kind", ["count", "torchs"])
def test_a_dataset_that_the_training_reads_itself_is_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    where = "validation_dataset" if kind == "torchs" else "train_dataset"
    monkeypatch.setattr(Tiny, where, lambda _task, _folder: _Rows(kind))
    with pytest.raises(WrongUse, match=f"a resume would change {where}.{kind}"):
        here.train(max_steps=12, workers=0)


def test_state_out_of_reach_is_refused_if_it_changes_step_2(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the bits find what the fingerprint cannot."""
    plain, file = Tiny.losses, Path("count")
    file.touch()

    def losses(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        if model.training:
            file.write_text(file.read_text() + ".")
        count = file.stat().st_size
        return {name: loss_B * (1 + count) for name, loss_B in plain(task, model, batch).items()}

    monkeypatch.setattr(Tiny, "losses", losses)
    with pytest.raises(WrongUse, match="the loss squared_error differs when the same step is"):
        here.train(max_steps=12)
