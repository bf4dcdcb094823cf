"""The Python state that a captured step was recorded with: a replay does not look at it again."""

import functools
import operator
import sys
from collections import deque
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy
from torch import Tensor

from trainer.loop.state import Job
from trainer.system.sources import is_users_module

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CODE = (ModuleType, type, FunctionType)
_OPAQUE = ("torch", "trainer", "trainbox")  # the packages whose objects are not looked into
_MOST_ELEMENTS = 200  # of a list, dict or array whose elements are compared


class Surface:
    """The attributes, settings and variables that code of a step may read, as they were.

    These are the attributes of the task, of the modules and of other objects in them, the variables
    of the user's classes and Python modules, small containers and arrays in all of these, the
    settings of parameter groups besides the learning rate, and the memory of the model's tensors.
    Numbers and texts are compared by value, and other objects by identity.
    """

    def __init__(self, job: Job) -> None:
        self._seen, self._kinds = set[int](), set[type]()
        self._kept: list[Any] = []  # so that no id is used again
        # The name of an object, a function that returns its values, and the values.
        self._holders: list[tuple[str, Callable[[], Sequence[Any]], list[Any]]] = []
        # Most modules have many empty dicts, such as dicts of hooks.
        self._empty: list[Any] = []
        model = job.state.model
        self._add_object(type(job.task).__name__, job.task)
        for path, module in model.named_modules():
            self._add_object(f"{type(model).__name__}.{path}".rstrip("."), module)
        for number, group in enumerate(job.state.optimizer.param_groups, start=1):
            self._add(f"parameter group {number}", functools.partial(_settings, group))
        parameters = list(model.parameters())
        self._tensors = [*parameters, *model.buffers()]
        self._memory = self._memory_now()
        self._add("requires_grad", lambda: [p.requires_grad for p in parameters])

    def change(self) -> str:
        """Return the name of an object with a value that has changed, or ""."""
        if any(map(len, self._empty)):
            return "an empty container"
        if self._memory_now() != self._memory:
            return "the memory of a tensor of the model"
        for name, values, before in self._holders:
            now = values()
            if len(now) == len(before) and (
                all(map(operator.is_, now, before)) or all(map(_same, now, before))
            ):
                continue
            return name
        return ""

    def _memory_now(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]

    def _add(self, name: str, values: Callable[[], Sequence[Any]]) -> None:
        self._holders.append((name, values, list(values())))

    def _add_object(self, name: str, value: Any) -> None:
        """Add the attributes of an object, and the variables of its class and Python module."""
        self._look_into(name, getattr(value, "__dict__", {}), sys.maxsize)
        for kind in type(value).__mro__:
            if is_users_module(kind.__module__) and kind not in self._kinds:
                self._kinds.add(kind)
                self._add_variables(kind.__name__, kind)
                module = sys.modules.get(kind.__module__)
                self._look_into(kind.__module__, getattr(module, "__dict__", {}), sys.maxsize)

    def _add_variables(self, name: str, kind: type) -> None:
        self._add(name, lambda: list(vars(kind).values()))
        for value in vars(kind).values():
            self._look_into(name, value)

    def _look_into(self, name: str, value: Any, most: int = _MOST_ELEMENTS) -> None:
        """Add the values in an object, an array, or a container of at most `most` elements."""
        if type(value) in PLAIN or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, dict | list | tuple | deque | set | frozenset):
            if not value:
                self._empty.append(value)
            elif len(value) <= most:
                read = functools.partial(_values, value)
                self._add(name, read)
                for part in read():
                    self._look_into(name, part)
        elif isinstance(value, numpy.ndarray):
            if value.size <= _MOST_ELEMENTS:
                self._add(name, lambda: [value.tobytes()])
        elif not isinstance(value, (*_CODE, Tensor)):
            package = type(value).__module__.partition(".")[0]
            if package not in _OPAQUE and isinstance(own := getattr(value, "__dict__", None), dict):
                self._look_into(f"{name}, {type(value).__name__}", own)


def _values(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return list(container.values())
    if isinstance(container, set | frozenset):
        return sorted(map(repr, container))
    return list(container)


def _settings(group: dict[str, Any]) -> list[Any]:
    return [value for name, value in group.items() if name != "lr"]


def _same(now: Any, before: Any) -> bool:
    is_plain = type(now) is type(before) and type(now) in PLAIN
    return now is before or (is_plain and repr(now) == repr(before))  # a NaN is not equal to itself
