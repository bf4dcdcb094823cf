"""The Python state that a captured step was recorded with: a replay does not look at it again."""

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from trainer.loop.state import Job
from trainer.system.sources import is_users_module

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MOST_ELEMENTS = 200  # of a list or dict whose elements are compared
_MOST_HOLDERS = 20_000


class Surface:
    """The attributes, settings and variables that code of a step may read, as they were.

    These are the attributes of the task, the modules and the user's objects in them, the variables
    of their classes and Python modules, small lists and dicts in all of these, the settings of
    parameter groups besides the learning rate, and which parameters train. An object is compared
    by identity and a number by its value. The objects stay in memory, because a graph reads the
    memory of tensors among them.
    """

    def __init__(self, job: Job) -> None:
        self._seen = set[int]()
        # The name of an object, a function that returns its values, and the values.
        self._holders: list[tuple[str, Callable[[], Sequence[Any]], list[Any]]] = []
        model = job.state.model
        self._add_object(type(job.task).__name__, job.task)
        for path, module in model.named_modules():
            self._add_object(f"{type(model).__name__}.{path}".rstrip("."), module)
        for number, group in enumerate(job.state.optimizer.param_groups, start=1):
            self._add(f"parameter group {number}", functools.partial(_settings, group))
        parameters = list(model.parameters())
        self._add("requires_grad", lambda: [p.requires_grad for p in parameters])

    def change(self) -> str:
        """Return the name of an object with a value that has changed, or ""."""
        for name, values, before in self._holders:
            now = values()
            if len(now) == len(before) and (
                all(map(operator.is_, now, before)) or all(map(_same, now, before))
            ):
                continue
            return name
        return ""

    def _add(self, name: str, values: Callable[[], Sequence[Any]]) -> None:
        self._holders.append((name, values, list(values())))

    def _add_object(self, name: str, value: Any) -> None:
        """Add the attributes of an object, and the variables of its class and Python module."""
        self._add_container(name, getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            if is_users_module(kind.__module__):
                self._add_container(kind.__name__, kind.__dict__)
                module = sys.modules.get(kind.__module__)
                self._add_container(kind.__module__, getattr(module, "__dict__", {}))

    def _add_container(self, name: str, container: Any) -> None:
        if id(container) in self._seen or len(self._holders) >= _MOST_HOLDERS:
            return
        self._seen.add(id(container))
        read = functools.partial(_values, container)
        self._add(name, read)
        for value in read():
            if isinstance(value, dict | list):
                if len(value) <= _MOST_ELEMENTS:
                    self._add_container(name, value)
            elif is_users_module(type(value).__module__) and id(value) not in self._seen:
                self._seen.add(id(value))
                self._add_object(f"{name}, {type(value).__name__}", value)


def _values(container: Any) -> list[Any]:
    return container if isinstance(container, list) else list(container.values())


def _settings(group: dict[str, Any]) -> list[Any]:
    return [value for name, value in group.items() if name != "lr"]


def _same(now: Any, before: Any) -> bool:
    is_plain = type(now) is type(before) and type(now) in _PLAIN
    return now is before or (is_plain and repr(now) == repr(before))  # a NaN is not equal to itself
