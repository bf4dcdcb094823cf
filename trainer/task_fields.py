"""The fields of a task's class, and the conversion of their texts."""

import ast
import dataclasses
import inspect
import itertools
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from trainbox.disclosure.suggested_commands import nearest
from trainbox.errors import WrongUse
from trainbox.files.parsing import parse_whole
from trainbox.options.table import SETTINGS_BY_NAME
from trainbox.task import Task

_SEVERAL = re.compile(r",\s*[A-Za-z_]\w*=")  # `8,dropout=0.1` as the value of one field
# Comments for tools, not for people.
_FOR_TOOLS = re.compile(r"(noqa|type:|fmt:|pragma|mypy:|ruff:|pylint:)")
_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class TaskField:
    """One hyperparameter of a task.

    If a value is required, `default` is `dataclasses.MISSING`. `note` is the field's comment.
    """

    name: str
    type: type  # object: a type that --set does not support
    default: Any = dataclasses.MISSING
    note: str = ""


def fields_of_class(cls: type[Task]) -> list[TaskField]:
    """Return the fields of a task's class."""
    notes = _notes(cls)
    return [
        TaskField(
            f.name,
            _TYPES.get(getattr(f.type, "__name__", str(f.type)), object),
            f.default if f.default_factory is dataclasses.MISSING else f.default_factory(),
            notes.get(f.name, ""),
        )
        for f in dataclasses.fields(cls)
        if f.init
    ]


def check_declared(task: str, cls: type[Task], names: Iterable[str]) -> None:
    """Check that no name is a plain attribute or a parameter of __init__() instead of a field.

    Raises:
        WrongUse: one is. The message has the line that declares the field.
    """
    declared = {f.name for f in dataclasses.fields(cls)} | SETTINGS_BY_NAME.keys()
    parameters = inspect.signature(cls).parameters
    for name in names:
        value = getattr(cls, name, None)
        cure = "write"
        if name in declared:
            continue
        if name in parameters:
            value, cure = parameters[name].default, "remove __init__(), and write"
        elif type(value) not in _TYPES.values():
            continue
        kind = type(value).__name__
        line = f"{name}: {kind} = {value!r}" if kind in _TYPES else f"{name}: int = 32"
        raise WrongUse(f"task {task}: {name} is not a field: {cure} {line} in the class")


def _notes(cls: type[Task]) -> dict[str, str]:
    """Return the comment or the docstring of each field that has one."""
    notes: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] in ("trainbox", "builtins"):
            continue
        try:
            source = inspect.getsource(sys.modules[base.__module__])
        except (OSError, TypeError, KeyError):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                notes |= _notes_of_body(node.body, source.splitlines())
    return notes


def _notes_of_body(body: Sequence[ast.stmt], lines: Sequence[str]) -> dict[str, str]:
    """Return the notes of the fields in the body of a class.

    A note is the comment at the end of the field's line, the lines of comments above the field, or
    a string below the field.
    """
    notes = {}
    for node, below in itertools.pairwise([*body, ast.Pass()]):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        assert node.end_lineno is not None
        behind = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        above: list[str] = []
        for line in reversed(lines[: node.lineno - 1]):
            if not line.strip().startswith("#"):
                break
            above.insert(0, line)
        texts = [_comment([behind]), _comment(above)]
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            texts.append(" ".join(str(below.value.value).split()))
        notes[node.target.id] = next(filter(None, texts), "")
    return {name: note for name, note in notes.items() if note}


def _comment(lines: Sequence[str]) -> str:
    """Return the text of some lines that are comments, without comments for tools."""
    comments = [line.strip().lstrip("#").strip() for line in lines if line.strip()[:1] == "#"]
    return " ".join(text for text in comments if not _FOR_TOOLS.match(text))


def parse_fields(
    task: str,
    fields: Sequence[TaskField],
    given: Mapping[str, Any],
    shown: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the `given` values, for example of `--set name=value`, with the fields' types.

    `shown` has what messages call a given value that is not one of --set.

    Raises:
        WrongUse: a name is unknown, a value cannot be converted, or a required value is missing.
    """
    known = {f.name: f for f in fields}
    shown = {name: f"--set {name}={value}" for name, value in given.items()} | dict(shown or {})
    for name in given:
        if name not in known:
            fix = nearest(name, known, f"it has {', '.join(known) or 'none'}")
            if option := SETTINGS_BY_NAME.get(name.replace("-", "_")):
                fix = f"the option is --{option.key} {given[name]}"
                if not shown[name].startswith("--set "):  # --grid or --range
                    fix = f"write {shown[name].replace(name, option.key, 1)}"
            if re.search(r"\.py:\w+$", str(given[name])):
                fix = f"a file of --config names the task by name = {json.dumps(given[name])}"
            raise WrongUse(f"{shown[name]}: task {task} has no field {name}: {fix}")
    missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in given]
    if missing:
        raise WrongUse(
            f"task {task} has no default for {missing[0]}: add --set {missing[0]}=..."
            f"{_in_brackets(known[missing[0]])}"
        )
    return {name: _convert(known[name], value, shown[name]) for name, value in given.items()}


def _convert(field: TaskField, value: Any, shown: str) -> Any:
    text = str(value)
    if field.type not in _TYPES.values():
        raise WrongUse(
            f"{shown}: {field.name} has a type that --set does not support: annotate the field as "
            f"one of {', '.join(_TYPES)}"
        )
    try:
        if field.type is bool:  # the words of a switch in the environment, such as `off`
            return click.BOOL.convert(text, None, None)
        if field.type is int:
            return parse_whole(text)
        value = field.type(text)
    except (ValueError, click.BadParameter):
        pairs = " ".join(f"--set {pair.strip()}" for pair in f"{field.name}={text}".split(","))
        wanted = "true or false" if field.type is bool else f"a value of type {field.type.__name__}"
        cure = f"; separate fields, as in {pairs}" if _SEVERAL.search(text) else ""
        raise WrongUse(f"{shown}: give {wanted}{cure}{_in_brackets(field)}") from None
    except OverflowError as error:
        raise WrongUse(f"{shown}: {error}: give a smaller one") from None
    if isinstance(value, float) and math.isnan(value):
        raise WrongUse(
            f"{shown}: NaN is equal to nothing, so no resume would have the same settings: give "
            "another number"
        )
    return value


def _in_brackets(field: TaskField) -> str:
    return f" ({field.name}: {field.note.rstrip('.')})" if field.note else ""
