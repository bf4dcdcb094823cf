"""Convert the values of a task's fields, and read the fields from the source of the task.

The source is read without importing torch, so a misspelt --set is reported at once.
"""

import ast
import contextlib
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainbox.contract.errors import WrongUse
from trainbox.contract.hints import nearest
from trainbox.contract.parsing import parse_whole
from trainbox.contract.task_spec import TASKS_FOLDER, locate

FIELD_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class TaskField:
    """One hyperparameter of a task.

    If a value is required, `default` is `dataclasses.MISSING`.
    """

    name: str
    type: type  # object: a type that --set does not support
    default: Any = dataclasses.MISSING


def parse_fields(
    task: str,
    fields: Sequence[TaskField],
    given: Mapping[str, Any],
    written: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the values of `--set name=value`, converted to the types of the fields.

    `written` has what messages call the fields that an experiment's file has given.

    Raises:
        WrongUse: a name is unknown, a value cannot be converted, or a required value is missing.
    """
    known = {f.name: f for f in fields}
    shown = {name: f"--set {name}={value}" for name, value in given.items()} | dict(written or {})
    for name in given:
        if name not in known:
            fix = nearest(name, known, f"it has {', '.join(known) or 'none'}")
            raise WrongUse(f"{shown[name]}: task {task} has no field {name}: {fix}")
    missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in given]
    if missing:
        raise WrongUse(f"task {task} has no default for {missing[0]}: add --set {missing[0]}=...")
    return {name: _convert(known[name], value, shown[name]) for name, value in given.items()}


def _convert(field: TaskField, value: Any, shown: str) -> Any:
    text = str(value)
    if field.type not in FIELD_TYPES.values():
        raise WrongUse(
            f"{shown}: {field.name} has a type that --set does not support: "
            f"use one of {', '.join(FIELD_TYPES)}"
        )
    try:
        if field.type is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                text.lower()
            ]
        if field.type is int:
            return parse_whole(text)
        return field.type(text)
    except (ValueError, KeyError):
        raise WrongUse(f"{shown}: give a value of type {field.type.__name__}") from None
    except OverflowError as error:
        raise WrongUse(f"{shown}: {error}: give a smaller one") from None


def fields_of(
    task: str,
    pairs: Sequence[str],
    of_file: Mapping[str, Any] | None = None,
    written: Mapping[str, str] | None = None,
    swept: Collection[str] = (),
) -> dict[str, Any]:
    """Return the values of the task's fields from the file of settings and from --set.

    If the source of the task can be read without importing it, the fields are checked and have
    their types. Else they are as given, and the import of the task checks them.

    Args:
        task: the task, such as `my.py:Gestures`.
        pairs: the values of --set, such as `width=64`.
        of_file: the fields of the file of settings.
        written: what messages call the fields of the file.
        swept: the fields that a sweep varies; those of the file give way to it.

    Raises:
        WrongUse: a pair is malformed, or a field does not exist or has another type.
    """
    given = {name: value for name, value in (of_file or {}).items() if name not in swept}
    shown = {name: text for name, text in (written or {}).items() if name in given}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise WrongUse(f"--set {pair}: write NAME=VALUE, as in --set width=64")
        if name.endswith(":"):  # see `pairs_of`
            with contextlib.suppress(ValueError):
                name, value = name[:-1], json.loads(value)
        given[name] = value
        shown.pop(name, None)
    fields = static_fields(task)
    if fields is None:
        return given
    optional = [dataclasses.replace(f, default=None) if f.name in swept else f for f in fields]
    return parse_fields(task, optional, given, shown)


def pairs_of(task: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the values of --set for the trainer, which `fields_of` reads as these `fields`.

    A value that is not a text is JSON, as in `width:=12`, if the source of the task does not have
    the types of its fields: a run's name depends on the type.
    """
    has_types = static_fields(task) is not None
    return tuple(
        f"{name}={value}" if has_types or isinstance(value, str) else f"{name}:={json.dumps(value)}"
        for name, value in fields.items()
    )


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
        elif module in ("trainbox", "trainbox.task", "trainbox.classification"):
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
