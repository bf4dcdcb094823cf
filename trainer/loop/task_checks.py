"""Check a task's methods and what they return. Each error names the remedy."""

import contextlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from trainbox.contract.errors import WrongUse
from trainbox.task import Task
from trainer.data.examples import Collate
from trainer.data.nested import tensors_in
from trainer.loop.joined_optimizer import joined
from trainer.run.jsonl import KEYS_OF_ENTRIES

if TYPE_CHECKING:
    from trainbox.pictures import Picture

# Keys that an entry of a training also has. Others begin with "loss_" or "gpu_".
_KEYS_OF_TRAINING = (
    *KEYS_OF_ENTRIES,
    "loss",
    "learning_rate",
    "gradient_norm",
    "skipped_steps",
    "samples_per_second",
    "data_share",
    "exchange_share",
    "energy_kwh",
)

_REQUIRED = {
    "train_dataset": "return a map-style dataset of the training examples",
    "validation_dataset": "return a map-style dataset of the validation examples",
    "build_model": "return the nn.Module to train",
    "losses": "return {name: tensor (B,)}, or derive the task from Classification",
}


def check_defines(task: Task, name: str, remedy: str) -> None:
    """Raise WrongUse if the task has no method `name` of its own. `remedy` follows `define it`."""
    if getattr(type(task), name) is getattr(Task, name):
        raise WrongUse(f"task {_name(task)} has no method {name}(): define it{remedy}")


def check_task(task: Task) -> None:
    """Check the methods and defaults of a task.

    Raises:
        WrongUse: A required method is missing, a method has the wrong parameters, or a default has
            the wrong type.
    """
    _check_defaults(task)
    for name, remedy in _REQUIRED.items():
        check_defines(task, name, f", and {remedy}")
    for name, method in vars(Task).items():
        if not inspect.isfunction(method) or name.startswith("_"):
            continue
        own = getattr(task, name)
        for is_kind, written, remedy in (
            (inspect.iscoroutinefunction, "async def", "write def"),
            (inspect.isgeneratorfunction, "a generator", "use return instead of yield"),
        ):
            if is_kind(own):
                raise WrongUse(
                    f"task {_name(task)}: {name}() is {written}, so a call does not "
                    f"run it: {remedy}"
                )
        _, *parameters = inspect.signature(method).parameters
        by_name = {"training": True} if "training" in parameters else {}
        try:
            inspect.signature(own).bind(*parameters[: len(parameters) - len(by_name)], **by_name)
        except TypeError as error:
            raise WrongUse(
                f"task {_name(task)}: {name}() has the wrong parameters ({error}): write "
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
            raise WrongUse(f"task {_name(task)}: {name} is {value!r}: set it to {wanted}")
    if not isinstance(task.best_by, str):
        raise WrongUse(
            f"task {_name(task)}: best_by is {task.best_by!r}: set it to the name of a metric"
        )

    names = task.train_metrics
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise WrongUse(
            f"task {_name(task)}: train_metrics is {names!r}: set it to a tuple of names, such as "
            '("accuracy",)'
        )
    for name in names:
        if (
            name in _KEYS_OF_TRAINING
            or name.startswith(("loss_", "gpu_"))
            or not name.isprintable()
            or not name.strip()
        ):
            raise WrongUse(
                f"task {_name(task)}: train_metrics has the name {name!r}, which is reserved or "
                "not printable: rename it"
            )


def checked_task(task: Task, returned: Any) -> Task:
    """Return `returned`, the result of with_data(), or raise WrongUse."""
    if not isinstance(returned, Task):
        raise wrong_result(
            task, "with_data", returned, "the task, as in dataclasses.replace(self, ...)"
        )
    return returned


def checked_dataset(task: Task, method: str, returned: Any) -> "Dataset[Any]":
    """Return `returned`, the result of train_dataset() or another `method`, or raise WrongUse."""
    if isinstance(returned, IterableDataset):
        raise WrongUse(
            f"task {_name(task)}: {method}() returned {type(returned).__name__}, an "
            "IterableDataset, whose order cannot be shuffled: return a map-style dataset with "
            "__len__ and __getitem__"
        )
    if isinstance(returned, tuple):
        raise wrong_result(
            task, method, returned, "a dataset, such as TensorDataset(inputs, labels)"
        )
    if not hasattr(returned, "__getitem__"):
        raise wrong_result(
            task, method, returned, "a map-style dataset with __len__ and __getitem__"
        )
    if isinstance(returned, TensorDataset) and _has_collate(task):
        raise WrongUse(
            f"task {_name(task)}: {method}() returned a TensorDataset, whose batches do not need "
            "collate(): remove collate(), or return another map-style dataset"
        )
    dataset: Dataset[Any] = returned
    return dataset


def collate_of(task: Task) -> Collate:
    """Return the task's collate(), or that of torch.

    The task's function raises WrongUse if its result has no tensor.
    """
    if not _has_collate(task):
        return default_collate

    def checked(examples: list[Any]) -> Any:
        batch = task.collate(examples)
        if not tensors_in(batch):
            raise wrong_result(task, "collate", batch, "a tuple, list or dict of tensors")
        return batch

    return checked


def _has_collate(task: Task) -> bool:
    return type(task).collate is not Task.collate


def checked_model(task: Task, returned: Any) -> nn.Module:
    """Return `returned`, the result of build_model(), or raise WrongUse.

    The tensors of the model must be able to be trained, saved and restored.
    """
    if not isinstance(returned, nn.Module):
        raise wrong_result(task, "build_model", returned, "an nn.Module")
    for name, tensor in [*returned.named_parameters(), *returned.named_buffers()]:
        if is_lazy(tensor):
            raise WrongUse(
                f"task {_name(task)}: build_model() does not set the size of {name}: give "
                "its layer the input size, or run an example through the model in build_model()"
            )
        if tensor.is_meta:
            raise WrongUse(
                f"task {_name(task)}: build_model() leaves {name} on the meta device, "
                "without values: build the model on the CPU"
            )
        if any(
            stride == 0 and size > 1
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise WrongUse(
                f"task {_name(task)}: build_model() creates {name} with expand(), so its "
                "values share memory and cannot be restored: add .clone()"
            )
    return returned


def checked_optimizer(task: Task, returned: Any, model: nn.Module) -> Optimizer:
    """Return `returned`, the result of build_optimizer(), or raise WrongUse.

    A tuple of optimizers is joined to one. Each must have a parameter of `model`, and its step()
    must not need arguments.
    """
    parts: Sequence[Any] = returned if isinstance(returned, tuple) and returned else (returned,)
    for part in parts:
        _check_one_optimizer(task, part, model)
    try:
        return joined(parts)
    except ValueError:
        raise WrongUse(
            f"task {_name(task)}: build_optimizer() gives a parameter to two optimizers: give each "
            "optimizer parameters of its own"
        ) from None


def _check_one_optimizer(task: Task, returned: Any, model: nn.Module) -> None:
    if not isinstance(returned, Optimizer):
        raise wrong_result(
            task, "build_optimizer", returned, "a torch.optim.Optimizer or a tuple of them"
        )
    own = {id(parameter) for parameter in model.parameters()}
    if not any(
        id(parameter) in own for group in returned.param_groups for parameter in group["params"]
    ):
        raise WrongUse(
            f"task {_name(task)}: build_optimizer() returned {type(returned).__name__}, "
            "which has no parameter of the model: give it model.parameters()"
        )
    # A scheduler replaces the method of the object.
    _, *parameters = inspect.signature(type(returned).step).parameters.items()
    needed = [
        name
        for name, parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise WrongUse(
            f"task {_name(task)}: {type(returned).__name__}.step() needs the argument "
            f"{needed[0]}, which a training step does not pass: use another optimizer, such as "
            "AdamW"
        )


def checked_notes(task: Task, returned: Any) -> dict[str, str]:
    """Return `returned`, the result of notes(), or raise WrongUse."""
    if not isinstance(returned, dict):
        raise wrong_result(task, "notes", returned, "a dict {name: line}, which may be empty")
    return returned


def checked_factor(task: Task, returned: Any) -> float:
    """Return `returned`, the result of schedule(), or raise WrongUse."""
    try:
        finite = math.isfinite(returned)
    except (TypeError, ValueError, RuntimeError):
        finite = False
    if not finite:
        raise wrong_result(
            task, "schedule", returned, "a finite number, the factor on the learning rate"
        )
    factor: float = returned
    return factor


def checked_batch(task: Task, returned: Any) -> Any:
    """Return `returned`, the result of prepare(), or raise WrongUse."""
    if returned is None:
        raise wrong_result(task, "prepare", returned, "the batch")
    return returned


def checked_statistics(task: Task, returned: Any) -> dict[str, Tensor]:
    """Return `returned`, the result of statistics(), or raise WrongUse."""
    if not isinstance(returned, dict):
        raise wrong_result(task, "statistics", returned, "a dict {name: tensor}")
    for name, value in returned.items():
        if not isinstance(value, Tensor):
            raise WrongUse(
                f"task {_name(task)}: statistics() returned {name!r} as "
                f"{type(value).__name__} instead of a tensor: sum over the batch without .item()"
            )
    return {str(name): value for name, value in returned.items()}


def checked_predictions(task: Task, returned: Any, size: int) -> dict[str, Tensor]:
    """Return `returned`, the result of predictions() for `size` examples, or raise WrongUse."""
    if not isinstance(returned, dict) or not returned:
        raise wrong_result(task, "predictions", returned, "a dict {name: tensor (B,)}")
    for name, value in returned.items():
        shape = tuple(getattr(value, "shape", ()))
        if not isinstance(value, Tensor) or len(shape) not in (1, 2) or shape[0] != size:
            raise WrongUse(
                f"task {_name(task)}: predictions() returned {name!r} as {type(value).__name__} of "
                f"shape {shape}: return a tensor of shape ({size},) or ({size}, K)"
            )
    return {str(name): value for name, value in returned.items()}


def checked_metrics(task: Task, returned: Any) -> dict[str, float]:
    """Return `returned`, the result of metrics(), as plain numbers, or raise WrongUse."""
    if not isinstance(returned, Mapping):
        raise wrong_result(task, "metrics", returned, "a dict {name: number}")
    numbers_of = {}
    for name, value in returned.items():
        if name in KEYS_OF_ENTRIES or not str(name).isprintable() or not str(name).strip():
            raise WrongUse(
                f"task {_name(task)}: metrics() returned a metric named {name!r}, which is "
                "reserved or not printable: rename it"
            )
        try:
            numbers_of[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise WrongUse(
                f"task {_name(task)}: metrics() returned {name!r} as "
                f"{type(value).__name__} instead of a number: convert it with float(...)"
            ) from None
    return numbers_of


def checked_end(task: Task, returned: Any) -> bool:
    """Return `returned`, the result of finished(), as a bool, or raise WrongUse."""
    # A string, a list or a function would count as true and end the training. A tensor and NumPy's
    # bool have item().
    if isinstance(returned, int) or hasattr(returned, "item"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return bool(returned)
    raise wrong_result(task, "finished", returned, "True or False")


def checked_figures(task: Task, returned: Any) -> dict[str, "Picture"]:
    """Return `returned`, the result of figures(), or raise WrongUse."""
    if not isinstance(returned, dict):
        raise wrong_result(task, "figures", returned, "a dict {name: picture}, which may be empty")
    for name, figure in returned.items():
        if not callable(figure):
            _check_picture(task, name, figure)
    return returned


@torch.no_grad()
def drawn_figures(task: Task, figures: Mapping[str, "Picture"]) -> dict[str, Tensor]:
    """Return the pictures, drawn by the functions among `figures`, or raise WrongUse."""
    pictures = {name: figure() if callable(figure) else figure for name, figure in figures.items()}
    for name, picture in pictures.items():
        _check_picture(task, name, picture)
    return pictures


def _check_picture(task: Task, name: str, picture: Any) -> None:
    shape = tuple(getattr(picture, "shape", ()))
    if len(shape) != 3 or shape[0] not in (1, 3, 4) or 0 in shape:
        raise WrongUse(
            f"task {_name(task)}: figures() returned {name!r} as "
            f"{type(picture).__name__} of shape {shape}: return a uint8 picture of shape "
            "(3, H, W)"
        )


def wrong_result(task: Task, method: str, value: Any, wanted: str) -> WrongUse:
    """Return the error for a `method` that returned `value` instead of `wanted`."""
    forgotten = " (is a `return` missing?)" if value is None else ""
    found = (
        "None"
        if value is None
        else f"the class {value.__name__}"
        if isinstance(value, type)
        else type(value).__name__
    )
    return WrongUse(f"task {_name(task)}: {method}() returned {found}: return {wanted}{forgotten}")


def _name(task: Task) -> str:
    return type(task).__name__
