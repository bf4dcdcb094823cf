"""What a task's methods return: refused with the cure where the loop cannot use it."""

import contextlib
import inspect
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from trainer.errors import WrongUse
from trainer.task import Task

# What each entry of metrics.jsonl has already: a resume and `verify` read entries by them.
_KEYS_OF_ENTRIES = ("kind", "step", "epoch", "time_unix_s")

_NEEDED = {
    "train_dataset": "return a map-style dataset of the training examples",
    "validation_dataset": "return a map-style dataset of the validation examples",
    "build_model": "return the nn.Module to train",
    "losses": "return {name: tensor (B,)}, or derive the task from Classification",
}


def check_task(task: Task) -> None:
    """Raise WrongUse if the task lacks a needed method, has one with other parameters, or a default
    of another type.
    """
    _check_defaults(task)
    for name, wanted in _NEEDED.items():
        if getattr(type(task), name) is getattr(Task, name):
            raise WrongUse(f"task {_name(task)} has no method {name}(): define it, and {wanted}")
    for name, method in vars(Task).items():
        if not inspect.isfunction(method) or name.startswith("_"):
            continue
        own = getattr(task, name)
        for is_kind, written, cure in (
            (inspect.iscoroutinefunction, "async def", "write def"),
            (inspect.isgeneratorfunction, "a generator", "use return instead of yield"),
        ):
            if is_kind(own):
                raise WrongUse(
                    f"task {_name(task)}: {name}() is {written}, so a call runs nothing "
                    f"of it: {cure}"
                )
        _, *parameters = inspect.signature(method).parameters
        by_name = {"training": True} if "training" in parameters else {}
        try:
            inspect.signature(own).bind(*parameters[: len(parameters) - len(by_name)], **by_name)
        except TypeError as error:
            raise WrongUse(
                f"task {_name(task)}: {name}() has other parameters ({error}): write "
                f"def {name}({', '.join(['self', *parameters])})"
            ) from None


def _check_defaults(task: Task) -> None:
    for name, kinds, wanted in (
        ("epochs", int, "a whole number from 1"),
        ("batch_size", int, "a whole number from 1"),
        ("learning_rate", int | float, "a number above 0"),
    ):
        value = getattr(task, name)
        if value is not None and (not isinstance(value, kinds) or not 0 < value < math.inf):
            raise WrongUse(f"task {_name(task)}: {name} is {value!r}, wanted {wanted}")
    if not isinstance(task.best_by, str):
        raise WrongUse(
            f"task {_name(task)}: best_by is {task.best_by!r}, wanted the name of a metric"
        )


def checked_task(task: Task, returned: Any) -> Task:
    """`returned`, by with_data()."""
    if not isinstance(returned, Task):
        raise _returned(
            task, "with_data", returned, "the task: `return dataclasses.replace(self, ...)`"
        )
    return returned


def checked_dataset(task: Task, method: str, returned: Any) -> "Dataset[Any]":
    """`returned`, by train_dataset() or validation_dataset()."""
    if isinstance(returned, IterableDataset):
        raise WrongUse(
            f"task {_name(task)}: {method}() returned {type(returned).__name__}, an "
            "IterableDataset, whose examples have one "
            "order only: return a map-style dataset, with __len__ and __getitem__"
        )
    if isinstance(returned, tuple):
        raise _returned(
            task, method, returned, "a dataset: wrap tensors as TensorDataset(inputs, labels)"
        )
    if not hasattr(returned, "__getitem__"):
        raise _returned(task, method, returned, "a map-style dataset, with __len__ and __getitem__")
    dataset: Dataset[Any] = returned
    return dataset


def checked_model(task: Task, returned: Any) -> nn.Module:
    """`returned`, by build_model(): a module whose tensors can be trained, saved and restored."""
    if not isinstance(returned, nn.Module):
        raise _returned(task, "build_model", returned, "an nn.Module")
    for name, tensor in [*returned.named_parameters(), *returned.named_buffers()]:
        if is_lazy(tensor):
            raise WrongUse(
                f"task {_name(task)}: build_model() leaves the size of {name} open: give "
                "its layer the input size instead of "
                "using a Lazy one, or run one example through the model in build_model()"
            )
        if tensor.is_meta:
            raise WrongUse(
                f"task {_name(task)}: build_model() leaves {name} without values, on the "
                "device meta: build it on the CPU"
            )
        if any(
            stride == 0 and size > 1
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise WrongUse(
                f"task {_name(task)}: build_model() makes {name} by expand(), so its "
                "values share memory and cannot be "
                "restored: add .clone()"
            )
    return returned


def checked_optimizer(task: Task, returned: Any, model: nn.Module) -> Optimizer:
    """`returned`, by build_optimizer(): one that trains `model`, and whose step() needs no
    arguments.
    """
    if not isinstance(returned, Optimizer):
        raise _returned(task, "build_optimizer", returned, "a torch.optim.Optimizer")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(
        id(parameter) in own for group in returned.param_groups for parameter in group["params"]
    ):
        raise WrongUse(
            f"task {_name(task)}: build_optimizer() returned {type(returned).__name__}, "
            "which has no parameter of the model: "
            "give it those of `model`, its argument"
        )
    needed = [
        name
        for name, parameter in inspect.signature(returned.step).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise WrongUse(
            f"task {_name(task)}: {type(returned).__name__}.step() needs a {needed[0]}, "
            "and a training step calls it without: "
            "use another optimizer, such as AdamW"
        )
    return returned


def checked_notes(task: Task, returned: Any) -> dict[str, str]:
    """`returned`, by notes()."""
    if not isinstance(returned, dict):
        raise _returned(task, "notes", returned, "a dict {name: line}, which may be empty")
    return returned


def checked_factor(task: Task, returned: Any) -> float:
    """`returned`, by schedule()."""
    try:
        finite = math.isfinite(returned)
    except (TypeError, ValueError, RuntimeError):
        finite = False
    if not finite:
        raise _returned(
            task, "schedule", returned, "the factor on the learning rate, a finite number"
        )
    factor: float = returned
    return factor


def checked_batch(task: Task, returned: Any) -> Any:
    """`returned`, by prepare()."""
    if returned is None:
        raise _returned(task, "prepare", returned, "the batch")
    return returned


def checked_statistics(task: Task, returned: Any) -> dict[str, Tensor]:
    """`returned`, by statistics()."""
    if not isinstance(returned, dict):
        raise _returned(task, "statistics", returned, "a dict {name: tensor}")
    for name, value in returned.items():
        if not isinstance(value, Tensor):
            raise WrongUse(
                f"task {_name(task)}: statistics() returned {name!r} as "
                f"{type(value).__name__}, wanted a tensor: sum over the "
                "batch without .item()"
            )
    return {str(name): value for name, value in returned.items()}


def checked_metrics(task: Task, returned: Any) -> dict[str, float]:
    """`returned`, by metrics(), with plain numbers."""
    if not isinstance(returned, Mapping):
        raise _returned(task, "metrics", returned, "a dict {name: number}")
    numbers_of = {}
    for name, value in returned.items():
        if name in _KEYS_OF_ENTRIES or not str(name).isprintable() or not str(name).strip():
            raise WrongUse(
                f"task {_name(task)}: metrics() returned a metric named {name!r}, which an "
                "entry of metrics.jsonl cannot have: "
                "give it another name"
            )
        try:
            numbers_of[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise WrongUse(
                f"task {_name(task)}: metrics() returned {name!r} as "
                f"{type(value).__name__}, wanted one "
                "number: float(...) of it"
            ) from None
    return numbers_of


def checked_end(task: Task, returned: Any) -> bool:
    """`returned`, by finished()."""
    # Every text, list and function is true, and would end the training. A tensor and NumPy's bool
    # have item().
    if isinstance(returned, int) or hasattr(returned, "item"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return bool(returned)
    raise _returned(task, "finished", returned, "True or False")


def checked_figures(task: Task, returned: Any) -> dict[str, Tensor]:
    """`returned`, by figures()."""
    if not isinstance(returned, dict):
        raise _returned(task, "figures", returned, "a dict {name: picture}, which may be empty")
    for name, picture in returned.items():
        shape = tuple(getattr(picture, "shape", ()))
        if len(shape) != 3 or shape[0] not in (1, 3, 4) or 0 in shape:
            raise WrongUse(
                f"task {_name(task)}: figures() returned {name!r} as "
                f"{type(picture).__name__} of shape {shape}, wanted a "
                "picture (3, H, W) uint8"
            )
    return returned


def _returned(task: Task, method: str, value: Any, wanted: str) -> WrongUse:
    forgotten = " (is a `return` missing?)" if value is None else ""
    found = (
        "None"
        if value is None
        else f"the class {value.__name__}"
        if isinstance(value, type)
        else type(value).__name__
    )
    return WrongUse(f"task {_name(task)}: {method}() returned {found}, wanted {wanted}{forgotten}")


def _name(task: Task) -> str:
    return type(task).__name__
