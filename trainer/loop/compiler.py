"""Stand-ins for parts of torch, in trainings that compile nothing: their imports take seconds.

Each torch optimizer imports torch's compiler, only to exclude functions from tracing. Each backward
that is given gradients imports torch's symbolic shapes, and sympy with them, only to compare two
shapes. Measurements and alternatives:
docs/decisions/0013-the-compiler-is-not-imported-to-be-kept-out.md.
"""

import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

import torch

# The stand-ins answer the questions that these torch versions ask. To add a version, run
# tests/trainer/loop/test_compiler.py with it.
TESTED_TORCH = frozenset({"2.15.0"})
_COMPILER = "torch._dynamo"
_SYMBOLIC_SHAPES = "torch.fx.experimental.symbolic_shapes"


def postpone() -> None:
    """Replace the two modules until a caller needs more of them than optimizers and backwards do.

    Leave a module that is already imported. Do nothing if torch has a version that is not in
    TESTED_TORCH: training then starts about two seconds later, with the same bits.
    """
    if torch.__version__.partition("+")[0] not in TESTED_TORCH:
        return
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = torch._dynamo = _Compiler(_COMPILER)
    if _SYMBOLIC_SHAPES not in sys.modules:
        sys.modules[_SYMBOLIC_SHAPES] = _SymbolicShapes(_SYMBOLIC_SHAPES)


class _Postponed(ModuleType):
    """A module that is replaced by the real one for each use that it does not define itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.util.find_spec(name)
        self._leaving = threading.Lock()  # DataParallel has threads

    def _real(self) -> ModuleType:
        with self._leaving:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
            self._leave()
        return importlib.import_module(self.__name__)

    def _leave(self) -> None:
        """Undo what this module has changed elsewhere."""

    def __getattr__(self, name: str) -> Any:
        # `inspect` reads special names of all modules, which must not start the import. An import
        # of a part of a package reads `__path__`, and `import *` reads `__all__`.
        is_package = self.__spec__ and self.__spec__.submodule_search_locations is not None
        if name.startswith("__") and name != "__all__" and not (name == "__path__" and is_package):
            raise AttributeError(name)
        return getattr(self._real(), name)


class _Compiler(_Postponed):
    """A `torch._dynamo` that excludes functions from tracing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._excluded: list[Any] = []  # functions

    @staticmethod
    def graph_break() -> None:
        """Do nothing: no graph is recorded."""

    def disable(self, *arguments: Any, **options: Any) -> Any:
        """Return the function unchanged, for the call in torch/_compile.py: nothing traces it."""
        if len(arguments) != 2 or options != {"wrapping": False}:
            return self._real().disable(*arguments, **options)
        function, _recursive = arguments
        self._excluded.append(function)
        return function

    def _leave(self) -> None:
        # Without this attribute, torch/_compile.py calls the real `disable` at the next call.
        while self._excluded:
            vars(self._excluded.pop()).pop("__dynamo_disable", None)


class _SymbolicShapes(_Postponed):
    """A `torch.fx.experimental.symbolic_shapes` that compares two shapes of integers, for
    torch/autograd/__init__.py.
    """

    def sym_eq(self, left: Any, right: Any) -> Any:
        """Return whether two shapes are equal."""
        if all(type(size) is int for size in (*left, *right)):
            return tuple(left) == tuple(right)
        return self._real().sym_eq(left, right)

    def expect_true(self, found: Any) -> Any:
        """Return the boolean `found`."""
        return found if type(found) is bool else self._real().expect_true(found)
