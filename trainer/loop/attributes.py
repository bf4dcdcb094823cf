"""Find and restore plain attributes: state of modules, task and optimizer outside checkpoints."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from trainbox.task import Task
from trainer.loop.attribute_values import OF_EVERY_MODULE, PLAIN, ValueWalk, is_generator, parts_of
from trainer.system.sources import loaded_sources

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
_NUMBERS = (type(None), int, float)
_SHOWN = 60  # the most characters of a value in a message
FAST = "use --fast, which does not guarantee the same bits"  # the end of several messages
_ABSENT = ("absent",)


@dataclass(frozen=True)
class _Owner:
    """An object with attributes, whose names get the prefix `prefix`."""

    prefix: str
    holder: Any
    # Selects attributes by name and value. None selects all.
    selects: Callable[[str, Any], bool] | None = None
    hidden: frozenset[str] = frozenset()  # names of attributes that are ignored
    saved: bool = False  # whether the user's code saves the attributes, as in get_extra_state

    def selected(self) -> dict[str, Any]:
        """Return the attributes that are compared and restored."""
        attributes, selects = list(vars(self.holder).items()), self.selects
        return {
            n: v
            for n, v in attributes
            if n not in self.hidden and (selects is None or selects(n, v))
        }

    def restore(self, old: Mapping[str, Any]) -> None:
        """Set the attributes to the values `old`, and remove new attributes."""
        now = self.selected()
        for name in now.keys() - old.keys():
            if self.selects is None:
                del vars(self.holder)[name]
        for name, value in old.items():
            if isinstance(self.holder, type):
                setattr(self.holder, name, value)
            elif self.selects is None or name in now:
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
        self._partly_selected: set[str] = set()
        self._start: dict[str, Any] | None = None
        self._paused = False
        self.recomputed: set[str] = set()
        """The names that may change, because each forward sets them from its batch alone."""
        self.reported: set[str] = set()
        """The names whose change was reported, under --fast."""

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore all attributes after the body. Within the body, `changed` returns nothing.

        Attributes that `snapshot` cannot restore are in the next result of `changed`.
        """
        restore = self.snapshot()
        paused, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = paused
            restore()

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores all attributes as they are now.

        The function does not restore the numbers of a tensor or array above 4 MiB. A task may keep
        its dataset in an attribute, and a copy of the dataset may not fit in memory.
        """
        walk = self._walk()
        before = [(owner, selected, walk.restorer(selected)) for owner, selected in self._owned()]

        def restore() -> None:
            for owner, selected, restore_contents in before:
                restore_contents()
                owner.restore(selected)

        return restore

    def values(self) -> dict[str, Any]:
        """Return for each attribute a value that differs only if the attribute has changed."""
        walk, found = self._walk(), {}
        for owner, selected in self._owned():
            if owner.saved:
                continue
            for name, value in selected.items():
                found[owner.prefix + name] = walk.value(value)
                if owner.selects is not None:
                    self._partly_selected.add(owner.prefix + name)
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
            and not (name in self._partly_selected and (pair[0] is _ABSENT or pair[1] is _ABSENT))
        }

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Return `{name: (before, now)}` of the attributes that have changed since the first call.

        The names in `recomputed` are left out.
        """
        if self._paused:
            return {}
        now = self.values()
        if self._start is None:
            self._start = now
        return {
            name: pair
            for name, pair in self.differing(self._start, now).items()
            if name not in self.recomputed
        }

    def _walk(self) -> ValueWalk:
        """Return a walk that does not enter the objects of `_holders`."""
        return ValueWalk(self._model, {id(holder) for holder in self._holders()})

    def _holders(self) -> list[Any]:
        """Return the task, the optimizer, the modules and the datasets."""
        return [self._task, self._optimizer, *self._model.modules(), *self._datasets.values()]

    def _owned(self) -> list[tuple[_Owner, dict[str, Any]]]:
        """Return each owner with its selected attributes."""
        return [
            (owner, owner.selected())
            for owner in self._owners()
            if hasattr(owner.holder, "__dict__")
        ]

    def _owners(self) -> Iterator[_Owner]:
        """Yield all owners: the holders, their hooks, and the user's classes and modules."""
        for path, module in self._model.named_modules():
            saved = type(module).get_extra_state is not nn.Module.get_extra_state
            prefix = f"{path}." if path else ""
            yield _Owner(prefix, module, hidden=OF_EVERY_MODULE, saved=saved)
            if hooks := [
                hook for name in _HOOKS for hook in list((vars(module).get(name) or {}).values())
            ]:
                named = {f"hook {number}": hook for number, hook in enumerate(hooks)}
                yield _Owner(
                    prefix, SimpleNamespace(**named), lambda _, hook: parts_of(hook) is not None
                )
        yield _Owner(f"{type(self._task).__name__}.", self._task)
        saved = type(self._optimizer).state_dict is not torch.optim.Optimizer.state_dict
        yield _Owner("optimizer.", self._optimizer, hidden=_OF_EVERY_OPTIMIZER, saved=saved)
        for name, dataset in self._datasets.items():
            yield _Owner(f"{name}.", dataset, lambda _, value: is_generator(value))
        users = self._users_modules()
        for cls in dict.fromkeys(cls for holder in self._holders() for cls in type(holder).__mro__):
            if cls.__module__ in users:
                yield _Owner(f"{cls.__name__}.", cls, _is_number_or_generator)
        for name in users:
            if name in sys.modules:
                yield _Owner(f"{name}.", sys.modules[name], _is_number_or_generator)

    def _users_modules(self) -> list[str]:
        """Return the names of the user's modules that are loaded now."""
        if self._users[0] != len(sys.modules):  # search only then: it takes milliseconds
            self._users = (len(sys.modules), list(loaded_sources()))
        return self._users[1]


def describe_change(name: str, pair: tuple[Any, Any]) -> str:
    """Return how the attribute `name` has changed, and the remedy."""
    old, new = pair
    if isinstance(new, tuple) and new[0] == "random numbers":
        return (
            f"{name}, a random generator that checkpoints leave out: draw from torch's global "
            f"generator, or {FAST}"
        )
    values = (
        f" from {old!r} to {new!r}"
        if all(type(value) in PLAIN and len(repr(value)) < _SHOWN for value in pair)
        else ""
    )
    return f"{name}{values}, which checkpoints leave out: make it a buffer, or {FAST}"


def _is_number_or_generator(name: str, value: Any) -> bool:
    # Flags and containers are left out: most are caches or records of warnings that were printed.
    if type(value) in _NUMBERS:
        return not name.startswith("__")
    return is_generator(value)
