"""Check a task's methods and what they return. Each error names the remedy."""

import contextlib
import dis
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from trainbox.classification import Classification
from trainbox.errors import WrongUse
from trainbox.options.optimizers import OPTIMIZERS
from trainbox.task import Task
from trainbox.tensor_trees import copied, tensors_in
from trainer.data.examples import Collate, check_dense
from trainer.load_task import defaults_of, refuse_other_folder
from trainer.records.jsonl import KEYS_OF_ENTRIES

if TYPE_CHECKING:
    from trainbox.pictures import Picture

# Reserved names: keys of `train` entries in metrics.jsonl. Other keys begin with "loss_" or "gpu_".
_KEYS_OF_TRAINING = (
    *KEYS_OF_ENTRIES,
    "loss",
    "learning_rate",
    "gradient_norm",
    "skipped_steps",
    "samples_per_second",
    "data_share",
    "exchange_share",
)

_REQUIRED = {
    "train_dataset": "return a map-style dataset of the training examples",
    "validation_dataset": "return a map-style dataset of the validation examples",
    "build_model": "return the nn.Module to train",
    "losses": "return {name: tensor (B,)}, or derive the task from Classification",
}

# The class of a method's result, and for messages what the method must return.
_RESULTS: dict[str, tuple[type, str]] = {
    "with_classes": (Classification, "the task, as in dataclasses.replace(self, ...)"),
    "with_data": (Task, "the task, as in dataclasses.replace(self, ...)"),
    "notes": (dict, "a dict {name: line}, which may be empty"),
    "build_model": (nn.Module, "an nn.Module"),
    "losses": (dict, "a dict {name: tensor of shape (B,)}"),
    "statistics": (dict, "a dict {name: tensor}"),
    "metrics": (Mapping, "a dict {name: number}"),
    "figures": (dict, "a dict {name: picture}, which may be empty"),
    "predictions": (dict, "a dict {name: tensor (B,)}"),
}
_NOT_EMPTY = ("losses", "predictions")
_ROUNDING = 1e-6  # by which a factor on the learning rate may be below 0

# The test that an attribute of a task must pass, and for messages what the attribute must be.
_ATTRIBUTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "epochs": (lambda value: _is_positive(value, int), "a whole number from 1"),
    "batch_size": (lambda value: _is_positive(value, int), "a whole number from 1"),
    "learning_rate": (lambda value: _is_positive(value, int | float), "a number above 0"),
    "warmup_epochs": (
        lambda value: value == 0 or _is_positive(value, int | float),
        "a number from 0",
    ),
    "optimizer": (
        lambda value: value is None or value in OPTIMIZERS,
        f"one of {', '.join(OPTIMIZERS)}",
    ),
    "weight_decay": (
        lambda value: value == 0 or _is_positive(value, int | float),
        "a number from 0",
    ),
    "clip_norm": (lambda value: _is_positive(value, int | float), "a number above 0"),
    "precision": (
        lambda value: value in (None, "fp32", "tf32", "bf16", "fp16"),
        "one of fp32, tf32, bf16, fp16",
    ),
    "best_by": (lambda value: isinstance(value, str), "the name of a metric"),
    "train_metrics": (
        lambda value: isinstance(value, tuple) and all(isinstance(name, str) for name in value),
        'a tuple of names, such as ("accuracy",)',
    ),
}


def check_defines(task: Task, name: str, remedy: str) -> None:
    """Raise WrongUse if the task does not define the method `name`.

    The message ends with `define it` and the `remedy`, such as `, and return an nn.Module`.
    """
    if getattr(type(task), name) is getattr(Task, name):
        raise WrongUse(f"task {_name(task)} has no method {name}(): define it{remedy}")


def check_task(task: Task) -> None:
    """Check the methods and attributes of a task.

    Raises:
        WrongUse: A required method is missing, a method has the wrong parameters, or an attribute
            has the wrong type.
    """
    found = defaults_of(task)
    for name, (is_valid, wanted) in _ATTRIBUTES.items():
        value = getattr(task, name) if name == "train_metrics" else found.get(name)
        if not is_valid(value):
            raise WrongUse(f"task {_name(task)}: {name} is {value!r}: set it to {wanted}")
    for name in task.train_metrics:
        _check_name(task, "train_metrics has the name", name, _KEYS_OF_TRAINING, "loss_", "gpu_")
    for name, remedy in _REQUIRED.items():
        check_defines(task, name, f", and {remedy}")
    methods = dict(vars(Task))
    if isinstance(task, Classification):
        methods |= vars(Classification)
    for name, method in methods.items():
        if not inspect.isfunction(method) or name.startswith("_"):
            continue
        _, *parameters = inspect.signature(method).parameters
        by_name = {"training": True} if "training" in parameters else {}
        by_position = parameters[: len(parameters) - len(by_name)]
        if isinstance(inspect.getattr_static(task, name), property | functools.cached_property):
            raise WrongUse(
                f"task {_name(task)}: {name} is a property, but Trainbox calls {name}(): remove "
                f"the decorator above def {name}"
            )
        try:
            inspect.signature(getattr(task, name)).bind(*by_position, **by_name)
        except (TypeError, ValueError) as error:  # ValueError: not even self
            raise WrongUse(
                f"task {_name(task)}: {name}() has the wrong parameters ({error}): write "
                f"def {name}({', '.join(['self', *parameters])})"
            ) from None


def _is_positive(value: Any, kinds: Any) -> bool:
    """Return whether `value` is a number above 0, or None."""
    return value is None or (isinstance(value, kinds) and 0 < value < math.inf)


def _check_name(
    task: Task, found: str, name: Any, reserved: Collection[str], *prefixes: str
) -> None:
    text = str(name)
    printable = text.isprintable() and text.strip()
    if text in reserved or text.startswith(prefixes) or not printable:
        raise WrongUse(
            f"task {_name(task)}: {found} {name!r}, which is reserved or not printable: rename it"
        )


def checked(task: Task, method: str, returned: Any) -> Any:
    """Return `returned`, the result of `method`, or raise WrongUse if it is of another class."""
    refuse_other_folder(_name(task), f"{method}()")
    kind, wanted = _RESULTS[method]
    if not isinstance(returned, kind) or (method in _NOT_EMPTY and not returned):
        raise wrong_result(task, method, returned, wanted)
    return returned


def reads_argument(method: Callable[..., Any], place: int) -> bool:
    """Return whether a method reads its positional argument at `place`; self is the first one.

    This is also true if the method cannot be read, such as a method with a decorator.
    """
    code = getattr(method, "__code__", None)
    if code is None or place >= code.co_argcount:  # *args
        return True
    name = code.co_varnames[place]
    loaded = {
        read
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith("LOAD_")
        # Python 3.13 loads two variables with one instruction.
        for read in (
            instruction.argval if isinstance(instruction.argval, tuple) else [instruction.argval]
        )
    }
    return name in loaded or name in code.co_cellvars or "locals" in code.co_names


_MOST_NAMES = 3  # of a dict that a message shows


def checked_dataset(task: Task, method: str, returned: Any) -> "Dataset[Any]":
    """Return `returned`, the result of train_dataset() or another `method`, or raise WrongUse."""
    refuse_other_folder(_name(task), f"{method}()")
    # Without this, a tuple of two tensors would be a dataset of two examples.
    unusual = isinstance(returned, IterableDataset | tuple)
    if unusual or not hasattr(returned, "__getitem__"):
        wanted = (
            "a map-style dataset with __len__ and __getitem__, such as TensorDataset(inputs, "
            "labels)"
        )
        raise wrong_result(task, method, returned, wanted)
    if type(returned) is dict and returned and 0 not in returned:
        names = ", ".join(map(str, [*returned][:_MOST_NAMES]))
        more = ", ..." if len(returned) > _MOST_NAMES else ""
        are_columns = not more and all(isinstance(part, Tensor) for part in returned.values())
        fix = f"return TensorDataset({names})" if are_columns else "return a dataset of examples"
        raise WrongUse(
            f"task {_name(task)}: {method}() returned a dict of {names}{more}, which has no "
            f"examples 0, 1, ...: {fix}"
        )
    if isinstance(returned, TensorDataset) and _has_collate(task):
        raise WrongUse(
            f"task {_name(task)}: {method}() returned a TensorDataset, whose batches do not need "
            "collate(): remove collate(), or return another map-style dataset"
        )
    if isinstance(returned, TensorDataset):
        check_dense(returned.tensors)
    dataset: Dataset[Any] = returned
    return dataset


def collate_of(task: Task) -> Collate:
    """Return the task's collate(), or torch's default_collate.

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


def checked_factor(task: Task, returned: Any) -> float:
    """Return `returned`, the result of schedule(), as a plain number, or raise WrongUse."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        # A checkpoint has the learning rate, and cannot have a number of NumPy.
        if not isinstance(returned, str) and -_ROUNDING <= (factor := float(returned)) < math.inf:
            return max(0.0, factor)
    raise wrong_result(
        task, "schedule", returned, "a finite number from 0, the factor on the learning rate"
    )


def checked_statistics(task: Task, returned: Any) -> dict[str, Tensor]:
    """Return `returned`, the result of statistics(), or raise WrongUse."""
    for name, value in checked(task, "statistics", returned).items():
        if not isinstance(value, Tensor):
            raise WrongUse(
                f"task {_name(task)}: statistics() returned {name!r} as "
                f"{type(value).__name__} instead of a tensor: sum over the batch without .item()"
            )
    return {str(name): value for name, value in returned.items()}


def checked_predictions(task: Task, returned: Any, size: int) -> dict[str, Tensor]:
    """Return `returned`, the result of predictions() for `size` examples, or raise WrongUse."""
    for name, value in checked(task, "predictions", returned).items():
        shape = tuple(getattr(value, "shape", ()))
        is_table = len(shape) in (1, 2) and shape[0] == size and 0 not in shape[1:]
        if not isinstance(value, Tensor) or not is_table:
            raise WrongUse(
                f"task {_name(task)}: predictions() returned {name!r} as {type(value).__name__} of "
                f"shape {shape}: return a tensor of shape ({size},) or ({size}, K)"
            )
    return {str(name): value for name, value in returned.items()}


def metrics_of(task: Task, totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics as plain numbers, or raise WrongUse. The task gets copies of `totals`."""
    try:
        returned = task.metrics(copied(totals))
    except KeyError as error:
        error.add_note(f"totals has {', '.join(totals)}")
        raise
    numbers = {}
    for name, value in checked(task, "metrics", returned).items():
        _check_name(task, "metrics() returned a metric named", name, KEYS_OF_ENTRIES)
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise WrongUse(
                f"task {_name(task)}: metrics() returned {name!r} as "
                f"{type(value).__name__} instead of a number: convert it with float(...)"
            ) from None
    return numbers


def checked_end(task: Task, returned: Any) -> bool:
    """Return `returned`, the result of finished(), as a bool, or raise WrongUse."""
    # A string, a list or a function would count as true and end the training. A tensor and NumPy's
    # bool have item().
    if isinstance(returned, int) or hasattr(returned, "item"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return bool(returned)
    raise wrong_result(task, "finished", returned, "True or False")


@torch.no_grad()
def drawn_figures(task: Task, figures: Mapping[str, "Picture"]) -> dict[str, Tensor]:
    """Return the pictures, drawn by the functions among `figures`, or raise WrongUse."""
    pictures = {name: figure() if callable(figure) else figure for name, figure in figures.items()}
    for name, picture in pictures.items():
        shape = tuple(getattr(picture, "shape", ()))
        if len(shape) != 3 or shape[0] not in (1, 3, 4) or 0 in shape:
            raise WrongUse(
                f"task {_name(task)}: figures() returned {name!r} as "
                f"{type(picture).__name__} of shape {shape}: return a uint8 picture of shape "
                "(3, H, W)"
            )
    return pictures


def check_same(task: Task, methods: str, found: Iterable[Any], expected: Any, wanted: str) -> None:
    """Check that the names and shapes of each batch, `found`, equal `expected`.

    Raises:
        WrongUse: they differ. The message ends with `return` and `wanted`.
    """
    if any(each != expected for each in found):
        raise WrongUse(
            f"task {_name(task)}: the names or shapes that {methods} returns differ between "
            f"batches: return {wanted}"
        )


def wrong_result(task: Task, method: str, value: Any, wanted: str) -> WrongUse:
    """Return the error for a `method` that returned `value` instead of `wanted`."""
    forgotten = " (is a `return` missing?)" if value is None else ""
    found = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    is_empty = isinstance(value, dict) and not value
    if value is None or isinstance(value, int | float) or is_empty:
        found = str(value)
    return WrongUse(f"task {_name(task)}: {method}() returned {found}: return {wanted}{forgotten}")


def _name(task: Task) -> str:
    return type(task).__name__
