"""Task: what a user writes. Finding a task by its name, and its fields, works without torch."""

import ast
import dataclasses
import difflib
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
    """One learning problem.

    Subclass as a frozen dataclass: its fields are its hyperparameters (`--set width=64`).

    A batch is what the dataset's examples collate to: a tuple, list or dict of tensors with the
    examples first.
    """

    epochs: ClassVar[int | None] = None
    batch_size: ClassVar[int | None] = None
    learning_rate: ClassVar[float | None] = None
    best_by: ClassVar[str] = "min:loss"

    def with_data(self, data_dir: Path) -> Self:
        """This task with the fields filled in that only the data can tell, such as its classes:
        asked before all else.
        """
        return self

    def train_dataset(self, data_dir: Path) -> "Dataset[Any]":
        """The training examples; torch is seeded by the run's seed before the call.

        A `TensorDataset` is held in memory, on
        the device where it fits, and indexed in batches; any other map-style dataset goes through
        loader workers.
        """
        raise NotImplementedError

    def validation_dataset(self, data_dir: Path) -> "Dataset[Any]":
        """The examples that models are chosen by; each is counted once, on any number of
        processes.
        """
        raise NotImplementedError

    def notes(self, train: "Dataset[Any]", validation: "Dataset[Any]") -> dict[str, str]:
        """What people should know of the data before they train on it, such as class weights:
        `{name: line}`.
        """
        return {}

    def build_model(self) -> "nn.Module":
        """A fresh model with its initial weights, drawn from torch's generator, which is seeded
        before the call.
        """
        raise NotImplementedError

    def losses(self, model: "nn.Module", batch: Any) -> "dict[str, Tensor]":
        """Per-example losses `{name: (B,)}`; their sum over names is minimised, averaged over the
        global batch.
        """
        raise NotImplementedError

    def prepare(self, batch: Any, training: bool) -> Any:
        """A whole batch on the device, made ready: bytes to floats, normalised, and augmented where
        `training`.
        """
        return batch

    def statistics(self, model: "nn.Module", batch: Any) -> "dict[str, Tensor]":
        """Sums over the batch's examples, of any shape: totals are their sums over the validation
        set.
        """
        per_example = self.losses(model, batch)
        total, *others = (loss_B.float().sum() for loss_B in per_example.values())
        return {"loss": sum(others, start=total)}

    def metrics(self, totals: "Mapping[str, Tensor]") -> dict[str, float]:
        """Figures from the totals (float64, on the CPU), which also hold `examples`, their number.

        Pure.
        """
        return {
            name: float(total / totals["examples"])
            for name, total in totals.items()
            if name != "examples"
        }

    def finished(self, metrics: "Mapping[str, float]") -> bool:
        """Whether a validation's metrics are all that was wanted, and training may end here.

        Pure.
        """
        return False

    def figures(
        self, model: "nn.Module", batch: Any, totals: "Mapping[str, Tensor]"
    ) -> "dict[str, Tensor]":
        """Pictures `{name: (3, H, W) uint8}` for TensorBoard, from one prepared validation batch
        and the totals.

        The batch of a Classification begins with wrong examples of the whole validation set.
        """
        return {}

    def build_optimizer(
        self, model: "nn.Module", name: str, learning_rate: float, weight_decay: float | None
    ) -> "Optimizer":
        """The optimizer `--optimizer` names.

        Override it for parameter groups; the schedule scales each group's rate.
        """
        return make_optimizer(name, model.parameters(), learning_rate, weight_decay)

    def schedule(self, step: int, total_steps: int, warmup_steps: int) -> float:
        """The factor on the learning rate at `step`, from 0: pure, so that a resume needs nothing
        saved.
        """
        return warmup_then_cosine(step, total_steps, warmup_steps)


@dataclass(frozen=True)
class TaskField:
    """One hyperparameter of a task; `default` is `dataclasses.MISSING` where a value must be
    given.
    """

    name: str
    type: type  # object: of a type that --set cannot give
    default: Any = dataclasses.MISSING


def parse_fields(
    task: str, fields: Sequence[TaskField], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of `--set name=value`, converted to the fields' types.

    Raises:
        WrongUse: a name that the task has not, a value that does not convert, or a needed one that
            is missing.
    """
    known = {f.name: f for f in fields}
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known) or 'none'}"
            raise WrongUse(f"--set {name}={given[name]}: task {task} has no field {name}; {hint}")
    missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in given]
    if missing:
        raise WrongUse(f"task {task} needs --set {missing[0]}=... (no default)")
    return {name: _convert(known[name], value) for name, value in given.items()}


def _convert(field: TaskField, value: Any) -> Any:
    text = str(value)
    if field.type not in FIELD_TYPES.values():
        raise WrongUse(
            f"--set {field.name}={text}: only fields of the types {', '.join(FIELD_TYPES)} "
            f"can be set, {field.name} has another"
        )
    try:
        if field.type is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                text.lower()
            ]
        return field.type(text)
    except (ValueError, KeyError):
        raise WrongUse(
            f"--set {field.name}={text}: {field.name} is of type {field.type.__name__}"
        ) from None


def built_in_tasks() -> list[str]:
    return sorted(path.stem for path in TASKS_FOLDER.glob("*.py") if path.stem != "__init__")


def locate(spec: str) -> tuple[Path | str, str]:
    """(file or dotted module, class name) of `digits`, `file.py:Class` or `module:Class`.

    Raises:
        WrongUse: no such built-in task or file, a file with the name of another module, or a spec
            of another form.
    """
    place, colon, class_name = spec.rpartition(":")
    if not colon:
        if spec in built_in_tasks():
            return TASKS_FOLDER / f"{spec}.py", "".join(
                word.capitalize() for word in spec.split("_")
            )
        if spec.endswith(".py"):
            raise WrongUse(f"task {spec} does not name the class: write {spec}:CLASS")
        close = difflib.get_close_matches(spec, built_in_tasks(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(built_in_tasks())}."
        raise WrongUse(f"no task {spec!r}: {hint} Your own is file.py:Class or module:Class")
    if not class_name.isidentifier():
        raise WrongUse(
            f"task {spec}: {class_name!r} is no class name; write file.py:Class or module:Class"
        )
    if not place.endswith(".py"):
        if not all(part.isidentifier() for part in place.split(".")):
            raise WrongUse(
                f"task {spec}: {place!r} is neither a .py file nor a module; write "
                "file.py:Class or module:Class"
            )
        return place, class_name
    if not Path(place).is_file():
        raise WrongUse(f"task {spec}: no file {place} (looked from {Path.cwd()})")
    check_name(Path(place))
    return Path(place), class_name


def load_task(spec: str, given: Mapping[str, Any]) -> Task:
    """Return the task `spec` with the given field values.

    Raises:
        WrongUse: no such task or field, or an error in the task's file, with its place there.
    """
    place, class_name = locate(spec)
    try:
        return _loaded(spec, place, class_name, given)
    except WrongUse:
        raise
    except Exception as error:
        from trainer.task_errors import import_mistake

        raise import_mistake(error, spec, place) from error


def _loaded(spec: str, place: Path | str, class_name: str, given: Mapping[str, Any]) -> Task:
    module = _import_file(place) if isinstance(place, Path) else _import_module(spec, place)
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        tasks = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Task)
        ]
        raise WrongUse(
            f"task {spec}: {place} holds no Task named {class_name}; it holds "
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
    """The fields of an imported task class."""
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
    make_importable(path.parent)  # its neighbours, also for loader workers
    return importlib.import_module(path.stem)


def _import_module(spec: str, name: str) -> types.ModuleType:
    make_importable()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise WrongUse(
                f"task {spec}: no module {error.name} (looked in {Path.cwd()} and the "
                "installed ones)"
            ) from error
        raise


# What follows reads a task's fields from its source, so that a misspelt --set is told without
# importing torch.


def static_fields(spec: str) -> list[TaskField] | None:
    """The task's fields read from its source; None where only an import can tell (bases from
    elsewhere, say).

    Raises:
        WrongUse: no such file or class, or a file that is not Python.
    """
    place, class_name = locate(spec)
    if not isinstance(place, Path):
        return None
    return _fields_in_file(spec, place, class_name)


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
            f"task {spec}: {path} holds no class {class_name}; it holds "
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
            yield None  # a computed default or a type of the user's own


def _parse(spec: str, path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        place = path if error.lineno is None else f"{path}:{error.lineno}"
        raise WrongUse(f"task {spec}: {place} is not Python: {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise WrongUse(
            f"task {spec}: {path} has an expression that is nested too deeply: split it"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUse(f"task {spec}: {path} cannot be read: {error}") from error


def summary(spec: str) -> str:
    """The first line of the task class's docstring."""
    place, class_name = locate(spec)
    assert isinstance(place, Path)
    for node in _parse(spec, place).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return (ast.get_docstring(node) or "").split("\n")[0]
    return ""
