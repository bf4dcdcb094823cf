"""Report the metrics of a training script, beside the metrics that tasks use."""

import json
import operator
import time
from typing import Any

from trainbox import ranks
from trainbox.errors import WrongUse
from trainbox.files.entries import OWN_KINDS, plain
from trainbox.files.regular_files import append_line
from trainbox.folder import run_folder
from trainbox.folders.write_failures import writing
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
            **{name: plain(value, f"metrics({name}=...)") for name, value in values.items()},
        }
        path = run_folder() / "metrics.jsonl"
        with writing(path, "set another folder in TRAINBOX_RUN"):
            append_line(path, json.dumps(entry))


metrics = Metrics()
