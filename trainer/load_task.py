"""Import a task's class, make the task with the values of its fields, and list tasks."""

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from trainbox.commands import habits
from trainbox.disclosure.suggested_commands import command, nearest
from trainbox.errors import WrongUse
from trainbox.options.config import OF_THE_TASK
from trainbox.options.optimizers import OPTIMIZERS
from trainbox.options.table import SETTINGS_BY_NAME
from trainbox.processes.environment import user_folders
from trainbox.task import Task
from trainbox.task_names.task_spec import (
    TASKS_FOLDER,
    built_in_tasks,
    keep_namespaces,
    locate,
    make_importable,
)
from trainer.task_fields import check_declared, fields_of_class, parse_fields

_T = TypeVar("_T")
_STARTED_IN: dict[str, str] = {}  # the working folder before the task was imported
# Methods of a LightningModule and a LightningDataModule, and what they are in a task.
_OF_LIGHTNING = {
    "configure_optimizers": "build_optimizer",
    "configure_model": "build_model",
    "training_step": "losses",
    "validation_step": "statistics",
    "train_dataloader": "train_dataset",
    "val_dataloader": "validation_dataset",
    "test_dataloader": "test_dataset",
}
# Other names that other programs call or read, and what they are in a task.
_OPTIMIZER, _SCHEDULE = "write build_optimizer()", "write schedule()"
_OF_OTHERS = {
    **dict.fromkeys(("get_optimizer", "create_optimizer", "make_optimizer"), _OPTIMIZER),
    **dict.fromkeys(("get_scheduler", "create_scheduler", "lr_schedule", "lr_lambda"), _SCHEDULE),
    **dict.fromkeys(("train_sampler", "get_sampler", "sampler"), "Trainbox draws the examples"),
    "collate_fn": "write collate()",
    "compute_metrics": "write metrics()",
    "compute_loss": "write losses()",
    "warmup_steps": "write warmup_epochs",
}
_HOOK = re.compile(r"on_\w+_(start|end)|\w+_(epoch|batch|step)_(start|end)")
_SIMILAR = 0.8  # the similarity of `loss` and `losses`
_MOST_EDITS = 2  # letters of a misspelt name, such as `learnig_rate`, or `loss` for `losses`


def load_task(spec: str, given: Mapping[str, Any]) -> Task:
    """Return the task `spec` with the given field values.

    Raises:
        WrongUse: the task or a field does not exist, or the task's file raised an error.
    """
    return _imported(spec, lambda cls: cls(**parse_fields(spec, fields_of_class(cls), given)))


def task_class(spec: str) -> type[Task]:
    """Return the class of the task `spec`.

    Raises:
        WrongUse: the task does not exist, or its file raised an error.
    """
    return _imported(spec, lambda cls: cls)


def converted_fields(spec: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given field values with the types of the task's class.

    Raises:
        WrongUse: the task or a field does not exist, or a value has another type.
    """
    cls = task_class(spec)
    check_declared(spec, cls, given)
    return parse_fields(spec, fields_of_class(cls), given)


def _imported(spec: str, use: Callable[[type[Task]], _T]) -> _T:
    """Import the class of the task `spec`, and return what `use` makes of it."""
    source, class_name = locate(spec)
    for folder in user_folders(os.environ):
        keep_namespaces(Path(folder))
    _STARTED_IN["folder"] = os.getcwd()  # noqa: PTH109 - Path.cwd() takes ten times as long
    try:
        result = use(_class(spec, source, class_name))
        refuse_other_folder(spec, "its import")
        return result
    except WrongUse:
        raise
    except Exception as error:
        from trainer.task_errors import import_mistake  # its modules take 5 ms to import

        raise import_mistake(error, spec, source) from error


def refuse_other_folder(task: str, part: str) -> None:
    """Check that a `part` of the task has left the working folder as it was.

    The paths of the run and of the data are relative to this folder.

    Raises:
        WrongUse: The working folder is another one.
    """
    before = _STARTED_IN.get("folder")
    if before is not None and (now := os.getcwd()) != before:  # noqa: PTH109 - see above
        os.chdir(before)  # for the log, and for a sweep's next trial
        raise WrongUse(
            f"task {task}: {part} has changed the working folder to {now}, but the paths of the "
            "run are relative: remove os.chdir, and read files as Path(__file__).parent / NAME"
        )


def _class(spec: str, source: Path | str, class_name: str) -> type[Task]:
    module = _import_file(source) if isinstance(source, Path) else _import_module(spec, source)
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        tasks = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, Task)
            and not value.__module__.startswith("trainbox.")
        ]
        if isinstance(cls, type):
            raise WrongUse(
                f"task {spec}: the class {class_name} of {source} is not a task: write "
                f"class {class_name}(Task), with `from trainbox import Task`"
            )
        cure = f"it defines none; a script is started by `{command('run', str(source))}`"
        if tasks:
            cure = nearest(class_name, tasks, f"it defines {', '.join(tasks)}")
        raise WrongUse(f"task {spec}: {source} does not define a Task named {class_name}: {cure}")
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
    _check_names(spec, cls)
    _check_settings(spec, cls)
    return cls


def _check_names(spec: str, cls: type[Task]) -> None:
    """Check that the class does not misspell a name that Trainbox reads, such as `best_by`.

    A misspelt name differs by one or two letters. There is only advice about other similar names,
    which may be the user's own.

    Raises:
        WrongUse: it does.
    """

    unwritten = _unwritten(cls)
    for name in _unread(cls):
        if (meant := _OF_LIGHTNING.get(name)) in unwritten:
            raise WrongUse(
                f"task {spec}: Trainbox does not call {name}(): write {meant}() instead, or rename "
                f"it to _{name} if it is your own"
            )
        if near := "" if _reads(cls).passes_itself else _misspelt(name, cls):
            raise WrongUse(
                f"task {spec}: Trainbox does not read {name}: rename it to {near}, or to "
                f"_{name} if it is your own"
            )


def doubtful_names(cls: type[Task]) -> dict[str, str]:
    """Return the names of a user's task that nothing reads, with what may be meant.

    These are names that other programs read, and misspelt names that code outside of the task's
    files may read.
    """
    settings = {
        name.replace("-", "_"): f"write {row.parameter}"
        for name, option in habits.OPTIONS.items()
        if (row := SETTINGS_BY_NAME.get(option.strip("-").replace("-", "_")))
        and row.parameter in OF_THE_TASK
    }
    found = dict[str, str]()
    for name in _unread(cls):
        cure = (settings | _OF_OTHERS).get(name, "")
        if _HOOK.fullmatch(name):
            cure = "Trainbox calls no hooks"
        elif not cure and (near := _misspelt(name, cls)):
            cure = f"did you mean {near}?"
        if cure:
            found[name] = cure
    return found


def _unread(cls: type[Task]) -> list[str]:
    """Return the public names of a user's task that neither Trainbox nor the task's files read."""
    from trainbox.classification import Classification

    read = _reads(cls).names.union(dir(Classification))
    return sorted(name for name in _own(cls) - read if name[0] != "_")


def _unwritten(cls: type[Task]) -> set[str]:
    """Return the names that Trainbox reads and the class does not define.

    A class that defines `losses` may have a `loss` as well.
    """
    from trainbox.classification import Classification

    return {name for name in {*dir(Classification)} - _own(cls) if name[0] != "_"}


def _own(cls: type[Task]) -> set[str]:
    """Return the names that the task's own classes define."""
    return {name for base in _own_classes(cls) for name in vars(base)} | {
        field.name for field in dataclasses.fields(cls)
    }


def _own_classes(cls: type[Task]) -> tuple[type, ...]:
    """Return the classes that define the task, without those of Trainbox's library."""
    from trainbox.classification import Classification

    return tuple(base for base in cls.__mro__ if base not in Classification.__mro__)


def _misspelt(name: str, cls: type[Task]) -> str:
    """Return the name that differs by one or two letters, and that the class does not define."""
    from trainbox.classification import Classification

    # A method for a method, and a value for a value.
    is_method = callable(getattr(cls, name, None))
    alike = [
        other for other in _unwritten(cls) if callable(getattr(Classification, other)) is is_method
    ]
    near = difflib.get_close_matches(name, alike, n=1, cutoff=_SIMILAR)
    return near[0] if near and _edits(name, near[0]) <= _MOST_EDITS else ""


def _edits(name: str, other: str) -> int:
    """Return how many letters are inserted, removed or replaced from one name to the other."""
    changes = difflib.SequenceMatcher(None, name, other).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal")


# Calls that do not read the fields of a task.
_HARMLESS = {"super", "replace", "isinstance", "type", "repr", "hash", "__setattr__"}


class _Reads(NamedTuple):
    """The attributes that a task's own files read of it, and whether other code may read more."""

    names: frozenset[str]
    passes_itself: bool


def _reads(cls: type[Task]) -> _Reads:
    """Read the files that define the task, without those of Trainbox's library."""
    return _reads_of(_own_classes(cls))


@functools.cache  # the files of a task with many bases take 10 ms
def _reads_of(own: tuple[type, ...]) -> _Reads:
    known = {"self", "cls", "task", *(base.__name__ for base in own)}

    def is_task(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):  # type(self)
            return getattr(node.func, "id", "") == "type" and any(map(is_task, node.args))
        if isinstance(node, ast.Attribute):
            return node.attr == "__class__" and is_task(node.value)
        return isinstance(node, ast.Name) and node.id in known

    def is_self(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in ("self", "cls")

    names, passes = set[str](), False
    for base in own:
        try:
            tree = ast.parse(inspect.getsource(sys.modules[base.__module__]))
        except (OSError, TypeError, SyntaxError):
            return _Reads(frozenset(), True)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_task(node.value):
                names.add(node.attr)
            elif isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called in ("getattr", "attrgetter"):
                    names |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
                passes |= called not in _HARMLESS and any(map(is_self, node.args))
            passes |= isinstance(node, ast.Match) and is_self(node.subject)
    passes |= bool({"__dict__", "__dataclass_fields__"} & names)
    return _Reads(frozenset(names), passes)


def defaults_of(task: Task) -> dict[str, Any]:
    """Return the settings of which the task has a default.

    An attribute that the task itself reads is its own, except for four names. So is the name of an
    optimizer that only its build_optimizer() knows.
    """
    reads, always = _reads(type(task)).names, ("epochs", "batch_size", "learning_rate", "best_by")
    values = {n: getattr(task, n) for n in OF_THE_TASK if n in always or n not in reads}
    if values.get("optimizer") not in OPTIMIZERS and defines(task, "build_optimizer"):
        values.pop("optimizer", None)
    return {name: value for name, value in values.items() if value is not None}


def defines(task: Task, method: str) -> bool:
    """Return whether the task has a method of its own."""
    return getattr(type(task), method) is not getattr(Task, method)


def _check_settings(spec: str, cls: type[Task]) -> None:
    """Check that the class does not set an option of the training under a name that nobody reads.

    Raises:
        WrongUse: It does. The message has the right name.
    """
    values = {
        name
        for base in _own_classes(cls)
        for name, value in vars(base).items()
        if not callable(value) and not isinstance(value, property | functools.cached_property)
    } | {field.name for field in dataclasses.fields(cls)}
    for name in sorted(values & SETTINGS_BY_NAME.keys() - {*OF_THE_TASK}):
        if name in _reads(cls).names or _reads(cls).passes_itself:
            continue
        row = SETTINGS_BY_NAME[name]
        cure = (
            f"rename it to {row.parameter}, or"
            if row.parameter in OF_THE_TASK
            else f"remove it and give --{row.key}, or rename it"
        )
        raise WrongUse(
            f"task {spec}: neither Trainbox nor the task reads {name}: {cure} to _{name} if it is "
            "your own"
        )


def _summary(name: str) -> str:
    """Return the first line of the docstring of a built-in task, without its import."""
    source, class_name = locate(name)
    assert isinstance(source, Path)
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return (ast.get_docstring(node) or "").split("\n")[0]
    return ""


def listing(name: str | None, as_json: bool) -> str:
    """Return the built-in tasks with their summaries, or the fields of the task `name`."""
    if name is None:
        tasks = {task: _summary(task) for task in built_in_tasks()}
        if as_json:
            return json.dumps(tasks)
        return "\n".join(f"{task:<18}{text}" for task, text in tasks.items())
    values = {
        f.name: {
            "type": f.type.__name__,
            "default": None if f.default is dataclasses.MISSING else f.default,
            "note": f.note,
        }
        for f in fields_of_class(task_class(name))
    }
    if as_json:
        return json.dumps(values, default=str)
    lines = [f"{name}: {_summary(name)}" if ":" not in name else name]
    for field, entry in values.items():
        default = '""' if entry["default"] == "" else entry["default"]
        lines.append(f"  --set {field}=...  {entry['type']}, default {default}")
        lines += [" " * 6 + line for line in textwrap.wrap(str(entry["note"]), 90)]
    return "\n".join(lines)


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
