"""Compare and restore the values of plain attributes, with everything that they contain.

Containers, the user's objects and closures are entered, because a model may keep its state there.
"""

import contextlib
import copy
import functools
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, FunctionType, GeneratorType, MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trainer.records.digest import tensor_digest, value_digest
from trainer.system.sources import is_users_module

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
# Of a long container, only its length and this number of values at each end are compared.
_LONG = 1000
# A larger tensor or array is not copied, and only every k-th number is compared.
_MOST_BYTES = 2**22

_CODE = (FunctionType, MethodType, GeneratorType, CellType, functools.partial)
# `_flat_weights` is the list of an LSTM's parameters.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_flat_weights"}
_MOST_VALUES = 100_000  # the most values to compare in all attributes together


class _Computed:
    """The value for an activation, which equals everything.

    An activation is a tensor that a forward has computed with a graph.
    """

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


_COMPUTED = _Computed()


class ValueWalk:
    """A walk through attributes and their contents.

    It does not enter `roots`, the ids of objects whose attributes are walked separately.
    """

    def __init__(self, model: nn.Module, roots: set[int]) -> None:
        self._model, self._entered, self._remaining = model, roots, _MOST_VALUES

    @functools.cached_property
    def _saved(self) -> set[int]:
        """Return the start of the storage of each parameter and buffer."""
        return {_storage(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}

    def value(self, value: Any) -> Any:
        """Return a value that is equal for equal contents of `value`."""
        kind = type(value)
        if kind in PLAIN:
            return "nan" if kind is float and math.isnan(value) else value
        if _is_plain_tuple(value):
            return value
        self._remaining -= 1
        if (simple := self._without_parts(value)) is not None:
            return simple
        parts = parts_of(value)
        if parts is None or id(value) in self._entered or self._remaining < 0:
            return (kind.__name__,)
        self._entered.add(id(value))
        found = tuple((self.value(name), self.value(part)) for name, part in parts)
        self._entered.discard(id(value))
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

    def _without_parts(self, value: Any) -> Any:
        """Return the result of `value` for a value without parts, or None if it has parts."""
        if isinstance(value, Tensor):
            return self._tensor_value(value)
        if isinstance(value, numpy.ndarray | numpy.generic):
            return ("array", str(value.dtype), value.shape, value_digest(_subsampled(value)))
        if is_generator(value):
            return ("random numbers", value_digest(_generator_state(value)))
        if isinstance(value, torch.dtype | torch.device | itertools.count):
            return (type(value).__name__, repr(value))
        return None

    def _tensor_value(self, tensor: Tensor) -> Any:
        """Return the result of `value` for a tensor."""
        if tensor.grad_fn is not None:
            return _COMPUTED
        if not _has_numbers(tensor):
            return ("tensor", str(tensor.dtype), tuple(tensor.shape))
        if _storage(tensor) in self._saved:
            return ("saved", tuple(tensor.shape))
        return ("tensor", tuple(tensor.shape), tensor_digest(_subsampled(local(tensor).detach())))

    def restorer(self, value: Any) -> Callable[[], None]:
        """Return a function that restores the present content of the object `value`."""
        if type(value) in PLAIN or _is_plain_tuple(value) or id(value) in self._entered:
            return _do_nothing
        if isinstance(value, Tensor):
            return self._tensor_restorer(value)
        if isinstance(value, numpy.ndarray):
            return _array_restorer(value)
        if is_generator(value):
            state = _generator_state(value)
            return lambda: _set_generator_state(value, state)
        if (parts := parts_of(value)) is None:
            return _do_nothing
        self._entered.add(id(value))  # never removed, because an object is restored only once
        inner = [
            restore_part
            for _, part in parts
            if (restore_part := self.restorer(part)) is not _do_nothing
        ]
        restore_content = _content_restorer(value)

        def restore() -> None:
            restore_content()
            for restore_part in inner:
                restore_part()

        return restore

    def _tensor_restorer(self, tensor: Tensor) -> Callable[[], None]:
        """Return a function that restores the numbers of `tensor`, unless it is large or saved."""
        if (
            tensor.grad_fn is not None
            or not _has_numbers(tensor)
            or _storage(tensor) in self._saved
        ):
            return _do_nothing
        if local(tensor).nbytes > _MOST_BYTES:
            return _do_nothing
        values = tensor.detach().clone()

        def restore() -> None:
            with torch.no_grad():
                tensor.copy_(values)

        return restore


def _array_restorer(array: numpy.ndarray[Any, Any]) -> Callable[[], None]:
    """Return a function that restores the numbers of `array`, unless it is large."""
    if array.nbytes > _MOST_BYTES or not array.flags.writeable:
        return _do_nothing
    values = array.copy()
    return lambda: numpy.copyto(array, values)


def is_generator(value: Any) -> bool:
    """Return whether `value` is one of the `_GENERATORS`."""
    # Not isinstance, which runs Python code for torch.Generator, and takes most of a walk.
    return issubclass(type(value), _GENERATORS)


def _is_plain_tuple(value: Any) -> bool:
    """Return whether `value` is a short tuple of plain values, such as the size of a kernel."""
    return (
        type(value) is tuple
        and len(value) < _LONG
        and all(type(part) in (int, str, bool) for part in value)
    )


def parts_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the (name, value) pairs in `value`, or None if the walk does not enter it.

    Of a long container, only the values at its ends are returned.
    """
    if isinstance(value, dict):
        return _ends(value.items())
    if isinstance(value, list | tuple | deque):
        return ((None, part) for part in _ends(value))
    if isinstance(value, set | frozenset):
        return ((None, part) for part in itertools.islice(value, _LONG))
    return _parts_of_code(value) if isinstance(value, _CODE) else _parts_of_object(value)


def _parts_of_object(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the attributes of a module or of an object of a user's class, else None."""
    if isinstance(value, nn.Module):  # a module that the model does not know, such as in a list
        attributes = [
            (name, part) for name, part in list(vars(value).items()) if name not in OF_EVERY_MODULE
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
    state = (*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, vars(value))
    return [(None, part) for part in state if part]


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
    if len(values) <= 2 * _LONG:
        return list(values)
    return [*itertools.islice(values, _LONG), *itertools.islice(reversed(values), _LONG)]


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
    """Return the address of the memory of `tensor`. Its views have the same address."""
    return local(tensor).untyped_storage().data_ptr() if _has_numbers(tensor) else 0


def _subsampled(values: Any) -> Any:
    """Return `values`, or every k-th of them if they are large."""
    if values.nbytes <= _MOST_BYTES:
        return values
    return values.reshape(-1)[:: -(-values.nbytes // _MOST_BYTES)]


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


def _content_restorer(value: Any) -> Callable[[], None]:
    """Return a function that restores which objects `value` contains."""
    if isinstance(value, list | deque):
        elements = list(value)
        return lambda: _fill(value, value.extend, elements)
    if isinstance(value, set | dict):
        content = value.copy()
        return lambda: _fill(value, value.update, content)
    if isinstance(value, CellType):
        filled = dict(_filled(value))
        return lambda: _fill_cell(value, filled)
    if isinstance(value, tuple | frozenset | functools.partial | MethodType | GeneratorType):
        # These always contain the same objects. A generator cannot be rewound.
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
