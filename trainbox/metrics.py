"""Report the metrics of a training script, beside the metrics that tasks use."""

import json
import math
import operator
import time
from typing import Any

from trainbox import ranks
from trainbox.contract.entries import OWN_KINDS
from trainbox.contract.errors import WrongUse
from trainbox.contract.files import append_line
from trainbox.contract.storage import writing
from trainbox.folder import run_folder
from trainbox.task_metrics import TaskMetrics


class Metrics(TaskMetrics):
    """The function `trainbox.metrics`, with the metrics that tasks use as attributes.

    Both have the same name: `trainbox.metrics(step, loss=0.5)` reports values, and
    `trainbox.metrics.macro_f1(confusion)` computes one for a task.
    """

    def __call__(self, step: int, *, kind: str = "train", **values: Any) -> None:
        """Append a line with `values` to metrics.jsonl in the run folder, if this is rank 0.

        Args:
            step: The number of finished optimizer steps.
            kind: What is reported, such as `train` or `validation`. `health` and `gpus` are the
                entries of `trainbox run`.
            values: Numbers, strings, lists of them, and tensors or arrays. A value that is infinite
                or NaN becomes null, because JSON does not have it.

        Raises:
            StorageFailure: The file cannot be written.
            WrongUse: A value cannot be written as JSON, or it or `kind` has a reserved name.
        """
        if ranks.rank() != 0:
            return
        if reserved := {"time_unix_s"} & values.keys():
            raise WrongUse(f"metrics({min(reserved)}=...) is a reserved name: choose another one")
        if kind in OWN_KINDS:
            raise WrongUse(f"metrics(kind={kind!r}) is a reserved kind: choose another one")
        entry = {
            "kind": kind,
            "step": operator.index(step),
            "time_unix_s": round(time.time(), 3),
            **{name: _plain(name, value) for name, value in values.items()},
        }
        path = run_folder() / "metrics.jsonl"
        with writing(path, "set another folder in TRAINBOX_RUN"):
            append_line(path, json.dumps(entry))


def _plain(name: str, value: Any) -> Any:
    """Return `value` as plain JSON.

    Raises:
        WrongUse: it cannot be written as JSON.
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, part) for part in value]
    if isinstance(value, dict):
        return {str(key): _plain(name, part) for key, part in value.items()}
    if hasattr(value, "tolist"):  # a tensor, an array or a number of NumPy
        return _plain(name, value.tolist())
    raise WrongUse(
        f"metrics({name}=...) is a {type(value).__name__}, which JSON does not have: convert it "
        "to numbers, strings or lists"
    )


metrics = Metrics()


def __getattr__(name: str) -> Any:
    """Return a metric of tasks, for `from trainbox.metrics import macro_f1`."""
    if not name.startswith("_") and hasattr(TaskMetrics, name):
        return getattr(TaskMetrics, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
