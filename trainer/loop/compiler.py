"""Stand-ins for parts of torch's compiler, whose import takes half of a start.

A training that compiles nothing needs four functions of them: docs/decisions/0013-speed.md.
"""

import importlib
import sys
import threading
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

_TESTED_TORCH = "2.15.0"  # another version gets the real modules: a slower start, the same bits
_SHAPES = "torch.fx.experimental.symbolic_shapes"


def postpone() -> None:
    """Replace the modules that are not imported yet, until a caller needs more of them."""
    if torch.__version__.partition("+")[0] == _TESTED_TORCH:
        sys.modules.setdefault("torch._dynamo", _Compiler("torch._dynamo"))
        sys.modules.setdefault(_SHAPES, _Shapes(_SHAPES))


class _StandIn(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__, self._leaving = find_spec(name), threading.Lock()
        self._excluded: list[Any] = []  # functions

    def __getattr__(self, name: str) -> Any:
        # `inspect` reads special names of all modules. Only packages have the path of their parts.
        if name.startswith("__") and not (name == "__path__" and isinstance(self, _Compiler)):
            raise AttributeError(name)
        with self._leaving:  # DataParallel has threads
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
            while self._excluded:  # torch/_compile.py then calls the real `disable`
                vars(self._excluded.pop()).pop("__dynamo_disable", None)
        return getattr(importlib.import_module(self.__name__), name)


class _Compiler(_StandIn):
    def graph_break(self) -> None: ...  # no graph is recorded

    def disable(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) != 2 or options != {"wrapping": False}:  # not from torch/_compile.py
            return self.__getattr__("disable")(*arguments, **options)
        self._excluded.append(arguments[0])
        return arguments[0]


class _Shapes(_StandIn):
    def sym_eq(self, left: Any, right: Any) -> Any:
        whole = all(type(size) is int for size in (*left, *right))
        return tuple(left) == tuple(right) if whole else self.__getattr__("sym_eq")(left, right)

    def expect_true(self, found: Any) -> Any:
        return found if type(found) is bool else self.__getattr__("expect_true")(found)
