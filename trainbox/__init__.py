"""The public Python API for task files. All other modules are internal."""

from typing import TYPE_CHECKING, Any

from trainer.errors import StorageFailure, WrongUse
from trainer.task import Task

if TYPE_CHECKING:
    from trainbox import metrics, pictures
    from trainer.classification import Classification

__all__ = ["Classification", "StorageFailure", "Task", "WrongUse", "metrics", "pictures"]


def __getattr__(name: str) -> Any:
    """Import a name that needs torch when it is first used.

    `from trainbox import Task` then takes milliseconds.

    Raises:
        AttributeError: the API does not have `name`.
    """
    if name == "Classification":
        from trainer.classification import Classification

        return Classification
    if name in ("metrics", "pictures"):
        import importlib

        return importlib.import_module(f"trainbox.{name}")
    raise AttributeError(f"module 'trainbox' has no attribute {name!r}")
