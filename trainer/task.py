"""Define `Task`, the class that users write, and find tasks and their fields without torch."""

import ast
import dataclasses
import importlib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from trainer.errors import WrongUse
from trainer.settings.config import warmup_then_cosine
from trainer.settings.optimizers import make_optimizer
from trainer.settings.task_source import check_name, make_importable

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

TASKS_FOLDER = Path(__file__).parent / "tasks"
FIELD_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}

# Shape suffixes: B examples of a batch, C channels, H height, W width, K classes.


@dataclass(frozen=True)
class Task:
    """A learning problem: its data, model, losses and metrics.

    Write a task as a frozen dataclass. Its fields are its hyperparameters (`--set width=64`).

    A batch is the collated examples of the dataset: a tuple, list or dict of tensors. The first
    dimension of each tensor is B, the number of examples in the batch. A method may get a part of
    the global batch, so it must not depend on B.

    Raise `trainbox.WrongUse` for data or fields that cannot be used. Trainbox then prints the
    message without a traceback, and exits with code 2.
    """

    # The defaults of --epochs, --batch-size (global) and --lr. None: Trainbox's own.
    epochs: ClassVar[int | None] = None
    batch_size: ClassVar[int | None] = None
    learning_rate: ClassVar[float | None] = None
    # The metric that selects the best checkpoint: min:NAME or max:NAME.
    best_by: ClassVar[str] = "min:loss"

    def with_data(self, data_dir: Path) -> Self:
        """Return this task with the fields that depend on the data, such as its classes.

        This is called before every other method. A task is frozen, so return
        `dataclasses.replace(self, ...)`. `data_dir` is the folder of `--data-dir`.

        Raises:
            WrongUse: the data is missing or cannot be used.
        """
        return self

    def train_dataset(self, data_dir: Path) -> "Dataset[Any]":
        """Return the training examples. torch is seeded with the run's seed before the call.

        A `TensorDataset` is kept in memory and indexed in batches. It is moved to the device if it
        fits there. The examples of any other map-style dataset are read by loader workers.

        Raises:
            WrongUse: the data is missing or cannot be used.
        """
        raise NotImplementedError

    def validation_dataset(self, data_dir: Path) -> "Dataset[Any]":
        """Return the examples for validation, by which the best checkpoint is selected.

        Each example is counted once, on any number of processes.

        Raises:
            WrongUse: the data is missing or cannot be used.
        """
        raise NotImplementedError

    def notes(self, train: "Dataset[Any]", validation: "Dataset[Any]") -> dict[str, str]:
        """Return facts about the data to print before training, such as class weights.

        The result is `{name: line}`.
        """
        return {}

    def build_model(self) -> "nn.Module":
        """Return a new model with its initial weights, on the CPU.

        torch is seeded with the run's seed before the call.
        """
        raise NotImplementedError

    def losses(self, model: "nn.Module", batch: Any) -> "dict[str, Tensor]":
        """Return per-example losses `{name: (B,)}`, which are differentiable floats.

        Training minimises their sum over the names, averaged over the global batch.
        """
        raise NotImplementedError

    def prepare(self, batch: Any, training: bool) -> Any:
        """Return the batch in the form that the model needs, on the same device.

        Override this to convert bytes to floats, to normalise, and to augment if `training`. Draw
        random numbers from torch, which is seeded so that the bits do not depend on the number of
        processes. The result is the `batch` of all other methods.
        """
        return batch

    def statistics(self, model: "nn.Module", batch: Any) -> "dict[str, Tensor]":
        """Return sums over the examples of the batch, `{name: tensor of any shape}`.

        Their sums over the validation set are the totals for `metrics`. Gradients are off. The
        default is `{"loss": ()}`, the sum of all losses of the batch.
        """
        per_example = self.losses(model, batch)
        total, *others = (loss_B.float().sum() for loss_B in per_example.values())
        return {"loss": sum(others, start=total)}

    def metrics(self, totals: "Mapping[str, Tensor]") -> dict[str, float]:
        """Return the metrics `{name: value}` of a validation.

        `totals` are the sums of `statistics` over the validation set, as float64 tensors on the
        CPU. `totals["examples"]` is the number of examples. The default divides each total, which
        must have one element, by this number. This must be a pure function.
        """
        return {
            name: float(total / totals["examples"])
            for name, total in totals.items()
            if name != "examples"
        }

    def finished(self, metrics: "Mapping[str, float]") -> bool:
        """Return whether training may end after a validation with these metrics.

        This must be a pure function.
        """
        return False

    def figures(
        self, model: "nn.Module", batch: Any, totals: "Mapping[str, Tensor]"
    ) -> "dict[str, Tensor]":
        """Return pictures `{name: (3, H, W) uint8}` for TensorBoard.

        This is called after the last validation, and after each that is the best so far. `batch` is
        one prepared validation batch. For a `Classification`, it starts with wrongly classified
        examples of the whole validation set. `totals` are those of `metrics`.
        """
        return {}

    def build_optimizer(
        self, model: "nn.Module", name: str, learning_rate: float, weight_decay: float | None
    ) -> "Optimizer":
        """Return the optimizer that `--optimizer` names.

        Override this for parameter groups. The schedule scales the learning rate of each group. If
        `weight_decay` is None, the default of the optimizer applies.

        Raises:
            WrongUse: the optimizer does not exist.
        """
        return make_optimizer(name, model.parameters(), learning_rate, weight_decay)

    def schedule(self, step: int, total_steps: int, warmup_steps: int) -> float:
        """Return the factor on the learning rate at `step`, which counts from 0.

        The default rises linearly over `warmup_steps` and then falls to 0 as half a cosine
        (Loshchilov and Hutter, 2017). This must be a pure function, because a resume does not
        restore a schedule.
        """
        return warmup_then_cosine(step, total_steps, warmup_steps)


@dataclass(frozen=True)
class TaskField:
    """One hyperparameter of a task.

    If a value is required, `default` is `dataclasses.MISSING`.
    """

    name: str
    type: type  # object: a type that --set does not support
    default: Any = dataclasses.MISSING


def parse_fields(
    task: str, fields: Sequence[TaskField], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of `--set name=value`, converted to the types of the fields.

    Raises:
        WrongUse: a name is unknown, a value cannot be converted, or a required value is missing.
    """
    known = {f.name: f for f in fields}
    for name in given:
        if name not in known:
            import difflib

            close = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {close[0]}?" if close else f"it has {', '.join(known) or 'none'}"
            raise WrongUse(f"--set {name}={given[name]}: task {task} has no field {name}: {fix}")
    missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in given]
    if missing:
        raise WrongUse(f"task {task} has no default for {missing[0]}: add --set {missing[0]}=...")
    return {name: _convert(known[name], value) for name, value in given.items()}


def _convert(field: TaskField, value: Any) -> Any:
    text = str(value)
    if field.type not in FIELD_TYPES.values():
        raise WrongUse(
            f"--set {field.name}={text}: {field.name} has a type that --set does not support: "
            f"use one of {', '.join(FIELD_TYPES)}"
        )
    try:
        if field.type is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                text.lower()
            ]
        return field.type(text)
    except (ValueError, KeyError):
        raise WrongUse(
            f"--set {field.name}={text}: give a value of type {field.type.__name__}"
        ) from None


def built_in_tasks() -> list[str]:
    """Return the names of the built-in tasks, sorted."""
    return sorted(path.stem for path in TASKS_FOLDER.glob("*.py") if path.stem != "__init__")


def locate(spec: str) -> tuple[Path | str, str]:
    """Return the source of a task and the name of its class.

    `spec` is a built-in task such as `digits`, `file.py:Class` or `module:Class`. The source is a
    file or a dotted module.

    Raises:
        WrongUse: the task or the file does not exist, the file has the name of another module, or
            the spec has another form.
    """
    source, colon, class_name = spec.rpartition(":")
    if not colon:
        if spec in built_in_tasks():
            return TASKS_FOLDER / f"{spec}.py", "".join(
                word.capitalize() for word in spec.split("_")
            )
        if spec.endswith(".py"):
            raise WrongUse(f"task {spec} does not name the class: write {spec}:CLASS")
        import difflib

        close = difflib.get_close_matches(spec, built_in_tasks(), n=1)
        names = f"did you mean {close[0]}?" if close else f"use {', '.join(built_in_tasks())}"
        raise WrongUse(
            f"no task {spec!r}: {names} (a task of your own is file.py:Class or module:Class)"
        )
    if not class_name.isidentifier():
        raise WrongUse(
            f"task {spec}: {class_name!r} is not a class name: write file.py:Class or module:Class"
        )
    if not source.endswith(".py"):
        if not all(part.isidentifier() for part in source.split(".")):
            raise WrongUse(
                f"task {spec}: {source!r} is neither a .py file nor a module: write "
                "file.py:Class or module:Class"
            )
        return source, class_name
    if not Path(source).is_file():
        raise WrongUse(
            f"task {spec}: no file {source} in the current folder ({Path.cwd()}): check the path"
        )
    check_name(Path(source))
    return Path(source), class_name


def load_task(spec: str, given: Mapping[str, Any]) -> Task:
    """Return the task `spec` with the given field values.

    Raises:
        WrongUse: the task or a field does not exist, or the task's file raised an error.
    """
    source, class_name = locate(spec)
    try:
        return _loaded(spec, source, class_name, given)
    except WrongUse:
        raise
    except Exception as error:
        from trainer.task_errors import import_mistake

        raise import_mistake(error, spec, source) from error


def _loaded(spec: str, source: Path | str, class_name: str, given: Mapping[str, Any]) -> Task:
    module = _import_file(source) if isinstance(source, Path) else _import_module(spec, source)
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        tasks = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Task)
        ]
        raise WrongUse(
            f"task {spec}: {source} does not define a Task named {class_name}: it defines "
            f"{', '.join(tasks) or 'none'}"
        )
    fields = {f.name for f in dataclasses.fields(cls)}
    annotations = vars(cls).get("__annotations__", {})
    if undecorated := [
        name
        for name, kind in annotations.items()
        if name not in fields and "ClassVar" not in str(kind)
    ]:
        raise WrongUse(
            f"task {spec}: {', '.join(undecorated)} cannot be set: write "
            f"@dataclass(frozen=True) above {class_name}"
        )
    return cls(**parse_fields(spec, loaded_fields(cls), given))


def loaded_fields(cls: type[Task]) -> list[TaskField]:
    """Return the fields of an imported task class."""
    return [
        TaskField(
            f.name,
            FIELD_TYPES.get(getattr(f.type, "__name__", str(f.type)), object),
            f.default if f.default_factory is dataclasses.MISSING else f.default_factory(),
        )
        for f in dataclasses.fields(cls)
    ]


def _import_file(path: Path) -> types.ModuleType:
    if path.parent == TASKS_FOLDER:
        return importlib.import_module(f"trainer.tasks.{path.stem}")
    make_importable(path.parent)  # for modules next to the file, and for loader workers
    return importlib.import_module(path.stem)


def _import_module(spec: str, name: str) -> types.ModuleType:
    make_importable()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise WrongUse(
                f"task {spec}: no module {error.name} in {Path.cwd()} or among the installed "
                "modules: check the name"
            ) from error
        raise


# The functions below read a task's fields from its source. A misspelt --set is then reported
# without importing torch.


def static_fields(spec: str) -> list[TaskField] | None:
    """Return the task's fields from its source, or None if the source is not enough.

    This is the case if a base class is from another package, for example.

    Raises:
        WrongUse: the file or the class does not exist, or the file is not Python.
    """
    source, class_name = locate(spec)
    if not isinstance(source, Path):
        return None
    return _fields_in_file(spec, source, class_name)


def _fields_in_file(spec: str, path: Path, class_name: str) -> list[TaskField] | None:
    tree = _parse(spec, path)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    imports = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    if class_name not in classes:
        if class_name in imports:
            return None
        raise WrongUse(
            f"task {spec}: {path} does not define a class {class_name}: it defines "
            f"{', '.join(classes) or 'none'}"
        )
    fields: dict[str, TaskField] = {}
    for base in classes[class_name].bases:
        name = getattr(base, "id", "")
        module, imported = imports.get(name, ("", name))
        if name in classes:
            inherited = _fields_in_file(spec, path, name)
        elif module in ("trainbox", "trainer.task", "trainer.classification"):
            inherited = []
        elif module.startswith("trainer.tasks."):
            inherited = _fields_in_file(
                spec, TASKS_FOLDER / f"{module.rsplit('.', 1)[1]}.py", imported
            )
        else:
            return None
        if inherited is None:
            return None
        fields.update({f.name: f for f in inherited})
    for field in _own_fields(classes[class_name]):
        if field is None:
            return None
        fields[field.name] = field
    return list(fields.values())


def _own_fields(node: ast.ClassDef) -> Iterator[TaskField | None]:
    for statement in node.body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        annotation = ast.unparse(statement.annotation)
        if annotation.startswith(("ClassVar", "typing.ClassVar")):
            continue
        try:
            default = (
                dataclasses.MISSING
                if statement.value is None
                else ast.literal_eval(statement.value)
            )
            yield TaskField(statement.target.id, FIELD_TYPES[annotation], default)
        except (ValueError, KeyError):
            yield None  # a computed default or another type


def _parse(spec: str, path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        position = path if error.lineno is None else f"{path}:{error.lineno}"
        raise WrongUse(f"task {spec}: {position} is not Python ({error.msg}): fix it") from error
    except (RecursionError, MemoryError) as error:
        raise WrongUse(
            f"task {spec}: {path} has an expression that is nested too deeply: split it"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUse(f"task {spec}: {path} cannot be read: {error}") from error


def summary(spec: str) -> str:
    """Return the first line of the task class's docstring."""
    source, class_name = locate(spec)
    assert isinstance(source, Path)
    for node in _parse(spec, source).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return (ast.get_docstring(node) or "").split("\n")[0]
    return ""
