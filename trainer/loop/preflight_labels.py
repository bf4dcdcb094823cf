"""The preflight check of the labels of a Classification.

On a GPU, a label that is out of range would crash the process in the first forward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from trainbox.classification import Classification, counts_by_class
from trainbox.contract.errors import WrongUse
from trainer.data.nested import to_device
from trainer.loop.state import Inference
from trainer.loop.task_checks import checked_batch

_FIRST_ROWS = 64


def check_labels(job: Inference, part: str, dataset: Dataset[Any], examples: list[Any]) -> None:
    """Check the labels of `dataset`, the training or validation `part`, after `prepare`.

    If the labels are tensors in memory and `prepare` does not change them, all are checked.
    Otherwise those of `examples` are checked, which are batches of one example.

    Raises:
        WrongUse: A batch is not (inputs, labels), or a label is not the index of a class.
    """
    task = job.task
    if not isinstance(task, Classification) or not counts_by_class(task):
        return
    job.world.seed(job.config.seed, "trial", "labels")
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else ()
    for raw_batch in [tuple(tensor[:_FIRST_ROWS] for tensor in tensors)] if tensors else examples:
        batch = checked_batch(
            task, task.prepare(to_device(raw_batch, job.world.device), training=False)
        )
        labels_B = _labels(task, part, batch)
        if len(tensors) > 1 and torch.equal(labels_B.to(raw_batch[1].device), raw_batch[1]):
            labels_B = tensors[1]
        _check_range(task, part, labels_B)


def _labels(task: Classification, part: str, batch: Any) -> Tensor:
    """Return the labels (B,) of a prepared batch.

    Raises:
        WrongUse: The batch is not (inputs, labels), or the labels are not int64 of shape (B,).
    """
    name = type(task).__name__
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise WrongUse(
            f"task {name}: a {part} batch is {_form(batch)} instead of (inputs, labels): return "
            "pairs from the dataset, or return a pair from prepare()"
        )
    labels_B = batch[1]
    if not isinstance(labels_B, Tensor):
        raise WrongUse(
            f"task {name}: the {part} labels are {_form(labels_B)} instead of numbers: "
            "use the index of each class in class_names, from 0"
        )
    if labels_B.dtype != torch.int64 or labels_B.ndim != 1:
        raise WrongUse(
            f"task {name}: the {part} labels are "
            f"{str(labels_B.dtype).removeprefix('torch.')} of shape "
            f"{tuple(labels_B.shape)} instead of int64 of shape (B,): convert them with .long(), "
            "or one-hot labels with .argmax(1)"
        )
    return labels_B


def _check_range(task: Classification, part: str, labels_N: Tensor) -> None:
    """Raise WrongUse if a label is not the index of a class."""
    least, most, classes = int(labels_N.min()), int(labels_N.max()), len(task.class_names)
    if least < 0 or most >= classes:
        raise WrongUse(
            f"task {type(task).__name__}: the {part} labels are from {least} to {most}, but "
            f"class_names has {classes} names: number the classes from 0 to {classes - 1}, or "
            "add the missing names"
        )


def _form(value: Any) -> str:
    """Return a description such as `a tuple of 3`, `a dict of image, label` or `text ('cat')`."""
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return (
            f"text ({value[0]!r})"
            if value and isinstance(value[0], str)
            else f"a {type(value).__name__} of {len(value)}"
        )
    return f"a {type(value).__name__}"
