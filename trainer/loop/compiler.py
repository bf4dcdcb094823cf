"""torch's compiler, left out of a training that compiles nothing: importing it would take more than
a second of each start.

Every optimizer of torch's imports it, only to say what it must not trace. Why so, and what was
left: docs/decisions/0013-the-compiler-is-not-imported-to-be-kept-out.md.
"""

import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"


def postpone() -> None:
    """Let the compiler be imported by the first that needs more of it than optimizers do; nothing
    if it already is.
    """
    if _NAME not in sys.modules:
        sys.modules[_NAME] = torch._dynamo = _Postponed()


class _Postponed(ModuleType):
    """In the place of the compiler: knows that nothing is compiled, and gives way to the real one
    for any other question.
    """

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__spec__ = importlib.util.find_spec(_NAME)
        self._told_of: list[Any] = []  # functions
        self._leaving = threading.Lock()  # DataParallel has threads

    @staticmethod
    def graph_break() -> None:
        """There is no graph."""

    def disable(self, *words: Any, **options: Any) -> Any:
        """The same function, where torch/_compile.py asks at its first call; nobody traces it."""
        if len(words) != 2 or options != {"wrapping": False}:
            return self._real().disable(*words, **options)
        function, _recursive = words
        self._told_of.append(function)
        return function

    def _real(self) -> ModuleType:
        with self._leaving:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
            while self._told_of:
                vars(self._told_of.pop()).pop("__dynamo_disable", None)  # it asks again
        return importlib.import_module(_NAME)

    def __getattr__(self, name: str) -> Any:
        # Somebody may look at all modules; who imports a part asks for the path, or for all names.
        if name.startswith("__") and name not in ("__path__", "__all__"):
            raise AttributeError(name)
        return getattr(self._real(), name)
