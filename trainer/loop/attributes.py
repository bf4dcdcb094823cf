"""Find and restore plain attributes: state of modules, task and optimizer outside checkpoints."""

import contextlib
import copy
import functools
import itertools
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, GeneratorType, MethodType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer.records.digest import tensor_digest, value_digest
from trainer.system.sources import is_users_module, loaded_sources
from trainer.task import Task

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
# Of a long container, only its length and this number of values at each end are compared.
_LARGE = 1000
# A larger tensor or array is not copied, and only every k-th number is compared.
_LARGE_BYTES = 2**22

_CODE = (FunctionType, MethodType, GeneratorType, CellType, functools.partial)
# `_flat_weights` is the list of an LSTM's parameters.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_flat_weights"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# What load_state_dict sets, and flags that torch's optimizers clear at the first step.
_OF_EVERY_OPTIMIZER = frozenset(
    {
        "state",
        "param_groups",
        "defaults",
        "_need_device_dtype_check_for_fused",
        "_warned_capturable_if_run_uncaptured",
    }
)
_SHOWN = 60  # the most characters of a value in a message
_MOST_VALUES = 100_000  # the most values to look at in all attributes together


class _Computed:
    """The value for an activation, which equals everything.

    An activation is a tensor that a forward has computed with a graph.
    """

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


_COMPUTED = _Computed()
_ABSENT = ("absent",)


@dataclass(frozen=True)
class _Owner:
    """An object with attributes, whose names get the prefix `prefix`."""

    prefix: str
    holder: Any
    # Selects attributes by name and value. None selects all.
    chooses: Callable[[str, Any], bool] | None = None
    hidden: frozenset[str] = frozenset()  # names of attributes that are ignored
    saved: bool = False  # whether the user's code saves the attributes, as in get_extra_state

    def chosen(self) -> dict[str, Any]:
        """Return the attributes that are compared and restored."""
        attributes, chooses = list(vars(self.holder).items()), self.chooses
        return {
            n: v
            for n, v in attributes
            if n not in self.hidden and (chooses is None or chooses(n, v))
        }

    def put_back(self, old: Mapping[str, Any]) -> None:
        """Give the attributes the values `old` again, and remove new attributes."""
        now = self.chosen()
        for name in now.keys() - old.keys():
            if self.chooses is None:
                del vars(self.holder)[name]
        for name, value in old.items():
            if isinstance(self.holder, type):
                setattr(self.holder, name, value)
            elif self.chooses is None or name in now:
                vars(self.holder)[name] = value


class Attributes:
    """The attributes of the model's modules, of the task and of the optimizer.

    The numbers and generators of the user's classes and modules are included. A name is the path of
    the attribute: `layers.0.count` in the model, `MyTask.count`, `optimizer.count`,
    `my_module.COUNT`.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        datasets: Mapping[str, Dataset[Any]],
    ) -> None:
        """Include the generators of `datasets`, which this process reads without loader workers."""
        self._task, self._model, self._optimizer, self._datasets = task, model, optimizer, datasets
        self._users: tuple[int, list[str]] = (0, [])
        # The names of attributes of owners that do not select all their attributes.
        self._chosen: set[str] = set()
        self._start: dict[str, Any] | None = None
        self._held = False
        self.recomputed: set[str] = set()
        """The names that may move, since a forward sets each by its batch alone."""
        self.reported: set[str] = set()
        """The names that have moved under --fast, and were reported."""

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore all attributes after the body. Within the body, `moved` returns nothing.

        Attributes that `snapshot` cannot restore appear in the next result of `moved`.
        """
        restore = self.snapshot()
        held, self._held = self._held, True
        try:
            yield
        finally:
            self._held = held
            restore()

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores all attributes as they are now.

        The function does not restore the numbers of a tensor or array above 4 MiB. A task may keep
        its dataset in an attribute, and a copy of the dataset may not fit in memory.
        """
        walk = self._walk()
        before = [(owner, chosen, walk.keeper(chosen)) for owner, chosen in self._owned()]

        def restore() -> None:
            for owner, chosen, put_back in before:
                put_back()
                owner.put_back(chosen)

        return restore

    def values(self) -> dict[str, Any]:
        """Return for each attribute a value that changes only if the attribute has moved."""
        walk, found = self._walk(), {}
        for owner, chosen in self._owned():
            if owner.saved:
                continue
            for name, value in chosen.items():
                found[owner.prefix + name] = walk.value(value)
                if owner.chooses is not None:
                    self._chosen.add(owner.prefix + name)
        return found

    def differing(
        self, before: Mapping[str, Any], now: Mapping[str, Any]
    ) -> dict[str, tuple[Any, Any]]:
        """Return `{name: (before, now)}` of the differences between two results of `values`."""
        pairs = {
            name: (before.get(name, _ABSENT), now.get(name, _ABSENT)) for name in {**before, **now}
        }
        return {
            name: pair
            for name, pair in pairs.items()
            if pair[0] != pair[1]
            and not (name in self._chosen and (pair[0] is _ABSENT or pair[1] is _ABSENT))
        }

    def moved(self) -> dict[str, tuple[Any, Any]]:
        """Return `{name: (before, now)}` of the attributes that have moved since the first call.

        The names in `recomputed` are left out.
        """
        if self._held:
            return {}
        now = self.values()
        if self._start is None:
            self._start = now
        return {
            name: pair
            for name, pair in self.differing(self._start, now).items()
            if name not in self.recomputed
        }

    def _walk(self) -> "_Walk":
        """Return a walk that does not enter the holders."""
        return _Walk(self._model, {id(holder) for holder in self._holders()})

    def _holders(self) -> list[Any]:
        """Return the objects whose attributes are looked at: task, optimizer, modules, datasets."""
        return [self._task, self._optimizer, *self._model.modules(), *self._datasets.values()]

    def _owned(self) -> list[tuple[_Owner, dict[str, Any]]]:
        """Return each owner with its selected attributes."""
        return [
            (owner, owner.chosen()) for owner in self._owners() if hasattr(owner.holder, "__dict__")
        ]

    def _owners(self) -> Iterator[_Owner]:
        """Yield all owners: the holders, their hooks, and the user's classes and modules."""
        for path, module in self._model.named_modules():
            saved = type(module).get_extra_state is not nn.Module.get_extra_state
            prefix = f"{path}." if path else ""
            yield _Owner(prefix, module, hidden=_OF_EVERY_MODULE, saved=saved)
            if hooks := [
                hook for name in _HOOKS for hook in list((vars(module).get(name) or {}).values())
            ]:
                named = {f"hook {number}": hook for number, hook in enumerate(hooks)}
                yield _Owner(
                    prefix, SimpleNamespace(**named), lambda _, hook: _parts(hook) is not None
                )
        yield _Owner(f"{type(self._task).__name__}.", self._task)
        saved = type(self._optimizer).state_dict is not torch.optim.Optimizer.state_dict
        yield _Owner("optimizer.", self._optimizer, hidden=_OF_EVERY_OPTIMIZER, saved=saved)
        for name, dataset in self._datasets.items():
            yield _Owner(f"{name}.", dataset, _is_generator)
        users = self._users_modules()
        for cls in dict.fromkeys(cls for holder in self._holders() for cls in type(holder).__mro__):
            if cls.__module__ in users:
                yield _Owner(f"{cls.__name__}.", cls, _is_number_or_generator)
        for name in users:
            if name in sys.modules:
                yield _Owner(f"{name}.", sys.modules[name], _is_number_or_generator)

    def _users_modules(self) -> list[str]:
        """Return the names of the user's modules that are loaded now."""
        if self._users[0] != len(sys.modules):  # the search takes milliseconds
            self._users = (len(sys.modules), list(loaded_sources()))
        return self._users[1]


def lost_state(name: str, pair: tuple[Any, Any]) -> str:
    """Return how the attribute `name` has moved, and the remedy."""
    old, new = pair
    if isinstance(new, tuple) and new[0] == "random numbers":
        return (
            f"{name}, a generator of its own, which checkpoints leave out: draw from "
            "torch's global generator, or give up the "
            "same bits with --fast"
        )
    values = (
        f" from {old!r} to {new!r}"
        if all(type(value) in _PLAIN and len(repr(value)) < _SHOWN for value in pair)
        else ""
    )
    return (
        f"{name}{values}, which checkpoints leave out: make it a buffer, or give up the same "
        "bits with --fast"
    )


def _is_generator(_name: str, value: Any) -> bool:
    return isinstance(value, _GENERATORS)


def _is_number_or_generator(name: str, value: Any) -> bool:
    # Flags and containers are left out: most are caches or records of warnings that were printed.
    return (type(value) in (type(None), int, float) and not name.startswith("__")) or isinstance(
        value, _GENERATORS
    )


class _Walk:
    """A walk through attributes and their contents.

    It does not enter `roots`, the ids of objects whose attributes are looked at by themselves.
    """

    def __init__(self, model: nn.Module, roots: set[int]) -> None:
        self._model, self._inside, self._left = model, roots, _MOST_VALUES

    @functools.cached_property
    def _saved(self) -> set[int]:
        """Return the start of the storage of each parameter and buffer."""
        return {_storage(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}

    def value(self, value: Any) -> Any:
        """Return a value to compare `value` by."""
        kind = type(value)
        if kind in _PLAIN:
            return "nan" if kind is float and math.isnan(value) else value
        if _is_plain_tuple(value):
            return value
        self._left -= 1
        if (whole := self._whole(value)) is not None:
            return whole
        parts = _parts(value)
        if parts is None or id(value) in self._inside or self._left < 0:
            return (kind.__name__,)
        self._inside.add(id(value))
        found = tuple((self.value(name), self.value(part)) for name, part in parts)
        self._inside.discard(id(value))
        size = (
            len(value)
            if isinstance(value, dict | list | tuple | deque | set | frozenset)
            else len(found)
        )
        return (
            kind.__name__,
            size,
            frozenset(found) if isinstance(value, set | frozenset) else found,
        )

    def _whole(self, value: Any) -> Any:
        """Return a value to compare a value without parts by, or None if it has parts."""
        if isinstance(value, Tensor):
            return self._tensor_value(value)
        if isinstance(value, numpy.ndarray | numpy.generic):
            return ("array", str(value.dtype), value.shape, value_digest(_thinned(value)))
        if isinstance(value, _GENERATORS):
            return ("random numbers", value_digest(_generator_state(value)))
        if isinstance(value, torch.dtype | torch.device | itertools.count):
            return (type(value).__name__, repr(value))
        return None

    def _tensor_value(self, tensor: Tensor) -> Any:
        """Return a value to compare `tensor` by."""
        if tensor.grad_fn is not None:
            return _COMPUTED
        if not _has_numbers(tensor):
            return ("tensor", str(tensor.dtype), tuple(tensor.shape))
        if _storage(tensor) in self._saved:
            return ("saved", tuple(tensor.shape))
        return ("tensor", tuple(tensor.shape), tensor_digest(_thinned(local(tensor).detach())))

    def keeper(self, value: Any) -> Callable[[], None]:
        """Return a function that restores the present content of the object `value`."""
        if type(value) in _PLAIN or _is_plain_tuple(value) or id(value) in self._inside:
            return _do_nothing
        if isinstance(value, Tensor):
            return self._tensor_keeper(value)
        if isinstance(value, numpy.ndarray):
            return _array_keeper(value)
        if isinstance(value, _GENERATORS):
            state = _generator_state(value)
            return lambda: _set_generator_state(value, state)
        if (parts := _parts(value)) is None:
            return _do_nothing
        self._inside.add(id(value))  # never removed, because each object needs one keeper only
        inner = [keeper for _, part in parts if (keeper := self.keeper(part)) is not _do_nothing]
        content = _content_keeper(value)

        def restore() -> None:
            content()
            for keeper in inner:
                keeper()

        return restore

    def _tensor_keeper(self, tensor: Tensor) -> Callable[[], None]:
        """Return a function that restores the numbers of `tensor`, unless it is large or saved."""
        if (
            tensor.grad_fn is not None
            or not _has_numbers(tensor)
            or _storage(tensor) in self._saved
        ):
            return _do_nothing
        if local(tensor).nbytes > _LARGE_BYTES:
            return _do_nothing
        values = tensor.detach().clone()

        def restore() -> None:
            with torch.no_grad():
                tensor.copy_(values)

        return restore


def _array_keeper(array: numpy.ndarray[Any, Any]) -> Callable[[], None]:
    """Return a function that restores the numbers of `array`, unless it is large."""
    if array.nbytes > _LARGE_BYTES or not array.flags.writeable:
        return _do_nothing
    values = array.copy()
    return lambda: numpy.copyto(array, values)


def _is_plain_tuple(value: Any) -> bool:
    """Return whether `value` is a short tuple of plain values, such as the size of a kernel."""
    return (
        type(value) is tuple
        and len(value) < _LARGE
        and all(type(part) in (int, str, bool) for part in value)
    )


def _parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the pairs of name and value that `value` consists of, or None if it is not entered.

    Of a long container, only the values at its ends are returned.
    """
    if isinstance(value, dict):
        return _ends(value.items())
    if isinstance(value, list | tuple | deque):
        return ((None, part) for part in _ends(value))
    if isinstance(value, set | frozenset):
        return ((None, part) for part in itertools.islice(value, _LARGE))
    return _parts_of_code(value) if isinstance(value, _CODE) else _parts_of_object(value)


def _parts_of_object(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the attributes of a module or of an object of a user's class, else None."""
    if isinstance(value, nn.Module):  # a module that the model does not know, such as in a list
        attributes = [
            (name, part) for name, part in list(vars(value).items()) if name not in _OF_EVERY_MODULE
        ]
        return attributes + [
            pair
            for inner in (value._parameters, value._buffers, value._modules)
            for pair in inner.items()
        ]
    if not isinstance(value, type) and is_users_module(type(value).__module__):
        return [*(vars(value).items() if hasattr(value, "__dict__") else ()), *_in_slots(value)]
    return None


def _parts_of_code(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return what a function or a similar object keeps between calls, such as its closure."""
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, MethodType):
        return [("self", value.__self__)]
    if isinstance(value, CellType):
        return list(_filled(value))
    if isinstance(value, GeneratorType):
        return (
            []
            if value.gi_frame is None
            else [("line", value.gi_frame.f_lasti), *value.gi_frame.f_locals.items()]
        )
    if not is_users_module(value.__module__):
        return None
    kept = (*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, vars(value))
    return [(None, part) for part in kept if part]


def _filled(cell: CellType) -> Iterator[tuple[str, Any]]:
    """Yield the content of `cell`, if it has any."""
    with contextlib.suppress(ValueError):  # raised for an empty cell
        yield "cell", cell.cell_contents


def _in_slots(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of `value` that are in slots."""
    listed = (vars(cls).get("__slots__", ()) for cls in type(value).__mro__)
    names = [name for slots in listed for name in ((slots,) if isinstance(slots, str) else slots)]
    return [
        (name, getattr(value, name))
        for name in names
        if name != "__dict__" and hasattr(value, name)
    ]


def _ends(values: Any) -> Iterable[Any]:
    """Return all values, or the values at both ends of a long container."""
    if len(values) <= 2 * _LARGE:
        return list(values)
    return [*itertools.islice(values, _LARGE), *itertools.islice(reversed(values), _LARGE)]


def _has_numbers(tensor: Tensor) -> bool:
    """Return whether the numbers of `tensor` are in plain memory."""
    return (
        tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized
    )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's share of a sharded tensor, or the tensor itself."""
    share: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return share


def _storage(tensor: Tensor) -> int:
    """Return the start of the memory of `tensor`, which a view has in common with it."""
    return local(tensor).untyped_storage().data_ptr() if _has_numbers(tensor) else 0


def _thinned(values: Any) -> Any:
    """Return `values`, or every k-th of them if they are large."""
    if values.nbytes <= _LARGE_BYTES:
        return values
    return values.reshape(-1)[:: -(-values.nbytes // _LARGE_BYTES)]


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state()
    return copy.deepcopy(generator.bit_generator.state)


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _content_keeper(value: Any) -> Callable[[], None]:
    """Return a function that restores which objects `value` contains."""
    if isinstance(value, list | deque):
        elements = list(value)
        return lambda: _fill(value, value.extend, elements)
    if isinstance(value, set | dict):
        content = value.copy()
        return lambda: _fill(value, value.update, content)
    if isinstance(value, CellType):
        held = dict(_filled(value))
        return lambda: _fill_cell(value, held)
    if isinstance(value, tuple | frozenset | functools.partial | MethodType | GeneratorType):
        # These always contain the same objects. A generator cannot be set back.
        return _do_nothing
    attributes, slots = vars(value) if hasattr(value, "__dict__") else {}, _in_slots(value)
    content = attributes.copy()

    def restore() -> None:
        _fill(attributes, attributes.update, content)
        for name, part in slots:
            object.__setattr__(value, name, part)

    return restore


def _fill(value: Any, add: Callable[[Any], None], content: Any) -> None:
    """Replace the content of a container."""
    value.clear()
    add(content)


def _fill_cell(cell: CellType, content: Mapping[str, Any]) -> None:
    for part in content.values():
        cell.cell_contents = part


def _do_nothing() -> None:
    pass
