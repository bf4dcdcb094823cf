"""The fingerprint sees numbers, texts, containers, tensors and generators in attributes."""

import collections
import functools
import itertools
import os
import queue
import random
import threading
import tracemalloc
import types
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from tests.support.tiny import StepCounter, Tiny
from trainer.checks.fingerprint import Part, fingerprint, owners, set_numbers
from trainer.checks.hidden_state import differing

_COUNT = 0


class _Note:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.count, self.me, self.lock = 0, self, threading.Lock()


class _Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class _Hiding(_Note):
    """Hides its state from pickle."""

    def __reduce__(self) -> Any:
        return _Hiding, ()

    def __getstate__(self) -> object:
        raise TypeError("no state")


class _Names(set[int]):
    """A set of a user's class, whose order depends on what was added first."""


def _counter() -> Callable[[], None]:
    count = 0

    def counted() -> None:
        nonlocal count
        count += 1

    return counted


class _Stateful(StepCounter):
    """A model with attributes of each kind, which its forward does not change."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.number, self.text, self.nothing = 1.0, "", None
        self.list, self.deque = [0], collections.deque([0], maxlen=3)
        self.set, self.names, self.dict = {"b"}, _Names([0, 8]), dict.fromkeys(range(50), 0)
        self.nested = {"means": [torch.zeros(2)], "size": (1, 2)}
        self.array, self.numpys = numpy.zeros(3), numpy.int64(0)
        self.queue = queue.Queue[int]()
        self.of_torch, self.of_numpy = torch.Generator(), numpy.random.default_rng(0)
        self.of_python, self.older = random.Random(0), numpy.random.RandomState(0)  # noqa: S311
        self.object, self.slotted, self.hiding = _Note(), _Slotted(), _Hiding()
        self.weak = weakref.WeakKeyDictionary({self.object: 0})
        self.read_only = types.MappingProxyType({"a": [0]})
        self.__dict__["average"] = nn.Linear(4, 1)
        self.sparse = torch.eye(2).to_sparse()
        self.register_buffer("loose", torch.zeros(2), persistent=False)
        self.inner = torch.optim.SGD([torch.zeros(1)], 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.inner, 5)
        # Kinds that it does not see.
        self.closure, self.partial = _counter(), functools.partial(list.append, [])
        self.counter, self.expression = itertools.count(), (number for number in range(9))
        self.method = _Note().__init__


def _grow(owner: Any, name: str = "count") -> None:
    setattr(owner, name, getattr(owner, name, 0) + 1)


def _grow_global() -> None:
    global _COUNT  # noqa: PLW0603
    _COUNT += 1


def _add_one(module: nn.Linear) -> None:
    with torch.no_grad():
        module.weight.add_(1)


# The attribute and how it changes.
_SEEN: dict[str, Callable[[Any], Any]] = {
    "number": lambda model: _grow(model, "number"),
    "text": lambda model: setattr(model, "text", model.text + "."),
    "nothing": lambda model: setattr(model, "nothing", 1),
    "list": lambda model: model.list.append(1),
    "deque": lambda model: model.deque.append(sum(model.deque) + 1),
    "set": lambda model: model.set.add(str(len(model.set))),
    "names": lambda model: model.names.add(1),
    "dict": lambda model: model.dict.__setitem__(len(model.dict), 1),
    "nested": lambda model: model.nested["means"][0].add_(1),
    "array": lambda model: model.array.__iadd__(1),
    "numpys": lambda model: _grow(model, "numpys"),
    "queue": lambda model: model.queue.put(1),
    "of_torch": lambda model: torch.rand(1, generator=model.of_torch),
    "of_numpy": lambda model: model.of_numpy.normal(),
    "of_python": lambda model: model.of_python.random(),
    "older": lambda model: model.older.normal(),
    "object": lambda model: _grow(model.object),
    "slotted": lambda model: _grow(model.slotted),
    "hiding": lambda model: _grow(model.hiding),
    "weak": lambda model: model.weak.__setitem__(model.object, 1),
    "read_only": lambda model: model.read_only["a"].append(1),
    "average": lambda model: _add_one(model.average),
    "sparse": lambda model: setattr(model, "sparse", model.sparse * 2),
    "loose": lambda model: model.loose.add_(1),
    "inner": lambda model: model.inner.param_groups[0].update(lr=1.0),
    "scheduler": lambda model: _grow(model.scheduler, "last_epoch"),
}
_NOT_SEEN: dict[str, Callable[[Any], Any]] = {
    "a closure": lambda model: model.closure(),
    "a partial function": lambda model: model.partial(1),
    "an iterator": lambda model: next(model.counter),
    "a generator": lambda model: next(model.expression),
    "the object of a method": lambda model: _grow(model.method.__self__),
    "a variable of a class": lambda _model: _grow(_Stateful, "total"),
    "a variable of a module": lambda _model: _grow_global(),
    "the environment": lambda _model: os.environ.update(_SEEN=os.environ.get("_SEEN", "") + "."),
    "an attribute of a parameter": lambda model: _grow(model.linear.weight),
    "a hook": lambda model: model.register_forward_hook(lambda *_: None),
}


def _read(model: Any, task: Any = None, **datasets: Any) -> dict[str, Part]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return fingerprint(
        owners(task or Tiny(), model, optimizer, datasets), model.state_dict().values()
    )


@pytest.mark.parametrize("name", _SEEN)
def test_a_change_of_an_attribute_is_seen(name: str) -> None:
    model = _Stateful()
    before = _read(model)
    assert not differing(before, _read(model))
    _SEEN[name](model)
    assert f"_Stateful.{name}" in differing(before, _read(model))


@pytest.mark.parametrize("name", _NOT_SEEN)
def test_docs_list_what_is_not_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_SEEN", "")
    model = _Stateful()
    before = _read(model)
    _NOT_SEEN[name](model)
    assert not differing(before, _read(model))


def test_the_task_the_optimizer_and_the_datasets_are_read() -> None:
    class Counting(torch.optim.AdamW):
        steps = 0

    class Rows(Dataset[Any]):
        reads = 0

        def __len__(self) -> int:
            return 3

    task, model, rows = Tiny(), StepCounter(), Rows()
    vars(task)["calls"] = rows.reads = 0
    weight, bias = model.linear.parameters()
    plain, counting = torch.optim.AdamW([weight]), Counting([bias])
    joined: Any = torch.optim.SGD(model.parameters())
    joined.parts, counting.steps = (plain, counting), 0

    def read() -> dict[str, Part]:
        return fingerprint(owners(task, model, joined, {"train_dataset": Subset(rows, [0])}))

    before = read()
    vars(task)["calls"], counting.steps, rows.reads = 1, 1, 1
    assert differing(before, read()) == {
        "Tiny.calls",
        "Counting 2.steps",
        "train_dataset.dataset.reads",
    }


def test_the_wrapper_of_a_compiled_model_has_no_state_of_the_user() -> None:
    """Also if only a part of the model is compiled."""
    inner: Any = torch.compile(StepCounter(), backend="eager")
    model = nn.Sequential(inner)
    before = _read(model)
    vars(inner)["_number"] = 1  # as torch numbers its wrappers in the first forward
    assert not differing(before, _read(model))
    inner._orig_mod.calls = 1
    assert differing(before, _read(model)) == {"Sequential.0._orig_mod.calls"}


def test_what_a_checkpoint_has_is_not_read_again() -> None:
    model = StepCounter()
    model.views = [model.linear.weight.view(-1), model.forwards]
    data = TensorDataset(torch.zeros(2))
    before = _read(model, train_dataset=data)
    with torch.no_grad():
        model.linear.weight.add_(1)
        model.forwards.add_(1)
    assert not differing(before, _read(model, train_dataset=data))


def test_large_tensors_are_not_copied() -> None:
    model = _Stateful()
    model.array = numpy.zeros(2**23)  # 64 MiB
    tracemalloc.start()
    _read(model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_the_elements_of_a_set_are_state_and_their_order_is_not() -> None:
    def digest(*names: int) -> str:
        return _read(nn.Linear(1, 1), SimpleNamespace(names=_Names(names)))[
            "SimpleNamespace.names"
        ].digest

    assert list(_Names([0, 8])) != list(_Names([8, 0]))
    assert digest(0, 8) == digest(8, 0) != digest(0, 8, 16)


def test_numbers_of_the_user_can_be_set() -> None:
    model, task = _Stateful(), Tiny()
    vars(task)["calls"], model.list = 5, [1, {"n": 2}]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = owners(task, model, optimizer, {})
    numbers = {name: part.numbers for name, part in fingerprint(found).items() if part.numbers}
    # Not the numbers in a queue, a generator or an optimizer of a library.
    assert numbers.keys() == {
        "Tiny.calls",
        "Tiny.nan_at",
        "Tiny.noise",
        *(f"_Stateful.linear.{n}_features" for n in ("in", "out")),
        *(f"_Stateful.{n}" for n in ("number", "list", "deque", "dict", "numpys", "object")),
        *(f"_Stateful.{n}" for n in ("slotted", "hiding", "read_only", "weak", "scheduler")),
    }
    wanted = {
        name: {position: number + 100 for position, number in positions.items()}
        for name, positions in numbers.items()
    }
    set_numbers(found, wanted)
    assert (vars(task)["calls"], model.number, model.list) == (105, 101.0, [101, {"n": 102}])
    assert (model.object.count, model.slotted.count) == (100, 100)
    assert (type(model.numpys), int(model.numpys)) == (numpy.int64, 100)
    assert model.scheduler.last_epoch == 100
