"""A stand-in for torch's compiler, in trainings that compile nothing: the import of the compiler
takes more than a second.

Each torch optimizer imports it, only to exclude functions from tracing. Measurements and
alternatives: docs/decisions/0013-the-compiler-is-not-imported-to-be-kept-out.md.
"""

import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

import torch

# The stand-in answers the questions that these torch versions ask. To add a version, run
# tests/trainer/loop/test_compiler.py with it.
TESTED_TORCH = frozenset({"2.15.0"})
_NAME = "torch._dynamo"


def postpone() -> None:
    """Replace `torch._dynamo` until a caller needs more of it than optimizers do.

    Do nothing if it is already imported, or if torch has a version that is not in TESTED_TORCH:
    training then starts about a second later, with the same bits.
    """
    if _NAME not in sys.modules and torch.__version__.partition("+")[0] in TESTED_TORCH:
        sys.modules[_NAME] = torch._dynamo = _Postponed()


class _Postponed(ModuleType):
    """A `torch._dynamo` that excludes functions from tracing, and is replaced by the real module
    for any other use.
    """

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__spec__ = importlib.util.find_spec(_NAME)
        self._excluded: list[Any] = []  # functions
        self._leaving = threading.Lock()  # DataParallel has threads

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

    def _real(self) -> ModuleType:
        with self._leaving:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
            # Without this attribute, torch/_compile.py calls the real `disable` at the next call.
            while self._excluded:
                vars(self._excluded.pop()).pop("__dynamo_disable", None)
        return importlib.import_module(_NAME)

    def __getattr__(self, name: str) -> Any:
        # `inspect` reads special names of all modules, which must not start the import. An import
        # of a part of the compiler reads `__path__`, and `import *` reads `__all__`.
        if name.startswith("__") and name not in ("__path__", "__all__"):
            raise AttributeError(name)
        return getattr(self._real(), name)
