"""The public Python API. What is not listed in `__all__` is internal.

Task files import `Task` or `Classification`. Training scripts of your own import the other names
(docs/guides/library.md).
"""

import importlib
from typing import TYPE_CHECKING, Any

from trainbox.errors import StorageFailure, WrongUse
from trainbox.metrics import metrics

if TYPE_CHECKING:
    from trainbox import pictures
    from trainbox.batches import Batches, SeededDataset, seed_step
    from trainbox.checkpoints import Checkpoints, TrainState
    from trainbox.classification import Classification
    from trainbox.folder import run_folder
    from trainbox.order import epoch_order
    from trainbox.schedules import scheduler_factor
    from trainbox.stop import ignore_stop_signals, stop_requested
    from trainbox.task import Task

__all__ = [
    "Batches",
    "Checkpoints",
    "Classification",
    "SeededDataset",
    "StorageFailure",
    "Task",
    "TrainState",
    "WrongUse",
    "epoch_order",
    "ignore_stop_signals",
    "metrics",
    "pictures",
    "run_folder",
    "scheduler_factor",
    "seed_step",
    "stop_requested",
]

# The modules of the names that are imported when they are first used. `import trainbox` then takes
# milliseconds, and needs torch only for the names that use it.
_MODULES = {
    "Batches": "trainbox.batches",
    "Checkpoints": "trainbox.checkpoints",
    "SeededDataset": "trainbox.batches",
    "TrainState": "trainbox.checkpoints",
    "epoch_order": "trainbox.order",
    "ignore_stop_signals": "trainbox.stop",
    "run_folder": "trainbox.folder",
    "scheduler_factor": "trainbox.schedules",
    "seed_step": "trainbox.batches",
    "stop_requested": "trainbox.stop",
    "Classification": "trainbox.classification",
    "Task": "trainbox.task",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Raises:
        AttributeError: the API does not have `name`.
    """
    if name == "pictures":
        return importlib.import_module("trainbox.pictures")
    if name not in _MODULES:
        raise AttributeError(f"module 'trainbox' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
