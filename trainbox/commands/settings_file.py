"""Read a file of settings: an experiment's, such as exp.toml, or a run's config.json.

The values become texts as on the command line, which the options parse.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from trainbox.commands import habits
from trainbox.commands.toml_cures import cure_of
from trainbox.disclosure.suggested_commands import near_runs, nearest
from trainbox.errors import WrongUse
from trainbox.files.parsing import parse_json, parse_toml
from trainbox.files.regular_files import read_text
from trainbox.options import table
from trainbox.options.config import Config
from trainbox.options.table import Option

SUFFIX = ".toml"  # of the file of an experiment
TABLES = ("task", "train", "launch", "sweep")
_SUFFIXES = (".toml", ".json")
_MOST_BYTES = 2**20
# The options of each table.
_ROWS = {"train": table.KEYS_OF_TRAIN, "launch": table.LAUNCH, "sweep": table.KEYS_OF_SWEEP}


@dataclass(frozen=True)
class FileSettings:
    """The settings of a file.

    Attributes:
        path: the file.
        defaults: the texts by the names of the parameters; an option that repeats has a list.
        fields: the fields of the task.
        digest: the SHA-256 of an experiment's file; empty for a config.json.
    """

    path: Path
    defaults: dict[str, Any]
    fields: dict[str, Any]
    digest: str = ""


def read_settings(path: Path, ctx: click.Context) -> FileSettings:
    """Return the settings of the file of --config, or of the config.json in the folder of a run.

    Raises:
        WrongUse: the file, a key or a value is wrong. The message has one line.
    """
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        raise WrongUse(f"--config {path} does not exist: {_near(path)}")
    if path.suffix != SUFFIX:
        settings = _read_config(path)
        fields = settings.pop("fields", {})
        # As text, so that a value is parsed as on the command line. For example, 1.5 epochs are
        # refused.
        texts = {
            name: list(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in settings.items()
            if value is not None
        }
        return FileSettings(path, texts, fields)
    try:
        tables, digest = _read_experiment(path)
        task, fields = _task(f"{path}: [task]", tables["task"])
        defaults: dict[str, Any] = {} if task is None else {"task": task}
        for name, rows in _ROWS.items():
            if name == "sweep" and ctx.command.name != name:
                continue
            place, values = f"{path}: [{name}]", tables[name]
            if name == "sweep":
                values = dict(values)
                for key, text in (("grid", _grid), ("range", _range)):
                    if key in values:
                        defaults[f"{key}s"] = _arguments(f"{place} {key}", values.pop(key), text)
            defaults |= _option_defaults(ctx, place, values, rows)
    except ValueError as error:
        raise WrongUse(str(error)) from error
    return FileSettings(path, defaults, fields, digest)


def _read_config(path: Path) -> dict[str, Any]:
    """Return the settings in a JSON file such as a run's config.json.

    Raises:
        WrongUse: the file cannot be read, is not a JSON object, or has an unknown setting.
    """
    try:
        settings = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongUse(f"--config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WrongUse(
            f"--config {path} is not JSON ({error}): give a file NAME.toml, or a run's config.json"
        ) from error
    if not isinstance(settings, dict):
        raise WrongUse(
            f"--config {path} is not a JSON object: give a file such as a run's config.json"
        )
    if settings.get("kind") == "script":
        raise WrongUse(
            f"--config {path} is of a run of a script: the command in it starts the script again"
        )
    known = {f.name for f in dataclasses.fields(Config)}
    unknown = sorted(settings.keys() - known)
    if any(isinstance(settings[name], dict) for name in unknown):
        raise WrongUse(
            f"--config {path} is not like a run's config.json ({unknown[0]} is an object): write "
            "an experiment as TOML, as in exp.toml with [task] and [train]"
        )
    if unknown:
        raise WrongUse(
            f"--config {path} has an unknown setting ({unknown[0]}): "
            f"{nearest(unknown[0], sorted(known))}"
        )
    if not isinstance(settings.get("fields", {}), dict):
        raise WrongUse(
            f"--config {path}: fields must be an object of the task's fields, as in a "
            "run's config.json"
        )
    return settings


def _near(path: Path) -> str:
    """Return a question with the file of settings that is nearest to a missing one, or a cure."""
    try:
        beside = [other.name for other in path.parent.iterdir() if other.suffix in _SUFFIXES]
    except OSError:
        beside = []
    folder = str(path).removesuffix(path.name)
    if begun := [name for name in beside if name.startswith(f"{path.name}.")]:
        return f"did you mean {folder}{max(begun)}?"
    otherwise = near_runs(path, "give an experiment or a run's config.json")
    return nearest(path.name, sorted(beside), otherwise, folder)


def _read_experiment(path: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the tables of the file, and the SHA-256 of its text.

    A table that the file lacks is empty. The keys of options have `-` for `_`.

    Raises:
        ValueError: the file cannot be read, is not TOML, or has an unknown table or none. The
            message has one line.
    """
    import hashlib

    try:
        text = read_text(path, _MOST_BYTES)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--config {path} is not TOML: {error}") from error
    try:
        tables = parse_toml(text.removeprefix("\ufeff"))  # some editors write this mark
    except ValueError as error:
        cure = cure_of(text, str(error))
        raise ValueError(f"--config {path} is not TOML: {error}{cure and f': {cure}'}") from error
    if not tables:  # such as the output of a command that failed
        raise ValueError(
            f"--config {path} has no settings: write them below [task] and [train], or give a "
            "run's config.json"
        )
    for name, values in tables.items():
        if not isinstance(values, dict):
            raise ValueError(
                f"{path}: {name} is outside of a table: write it below [task], [train], [launch] "
                "or [sweep]"
            )
        if name not in TABLES:
            known = [f"[{table}]" for table in TABLES]
            raise ValueError(f"{path}: [{name}] is unknown: {nearest(f'[{name.lower()}]', known)}")
    found = {name: tables.get(name, {}) for name in TABLES}
    for name in TABLES[1:]:
        found[name] = _with_dashes(f"{path}: [{name}]", found[name])
    return found, hashlib.sha256(text.encode()).hexdigest()


def _with_dashes(table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    keys = {key: key.replace("_", "-") for key in values}
    for key, dashed in keys.items():
        if key != dashed and dashed in values:
            raise ValueError(f"{table} {key} and {dashed} are the same key: drop one")
    return {keys[key]: value for key, value in values.items()}


def _option_defaults(
    ctx: click.Context, table: str, values: Mapping[str, Any], rows: Iterable[Option]
) -> dict[str, str | list[str]]:
    """Return the values of a table as on the command line, by the names of the parameters.

    An option that can be repeated has a list, from an array or from a single value.

    `table` is the file and the table for messages, such as `exp.toml: [train]`.

    Raises:
        ValueError: a key is unknown, or a value is not valid for its option.
    """
    known = {row.key: row for row in rows}
    texts: dict[str, str | list[str]] = {}
    for key, value in values.items():
        where = f"{table} {key}"
        if key not in known:
            raise ValueError(f"{where} {_unknown(key, known)}")
        row = known[key]
        each = value if row.repeats and isinstance(value, list) else [value]
        given = [text_of(where, one) for one in each]
        text = given if row.repeats else given[0]
        if not row.repeats and (row.type is bool) != isinstance(value, bool):
            fix = "true or false, without quotes" if row.type is bool else "a value"
            shown = json.dumps(value, ensure_ascii=False)
            raise ValueError(f"{where} = {shown}: write {fix}")
        try:
            row.click().type_cast_value(ctx, text)
        except click.BadParameter as error:
            raise ValueError(f"{where} = {text}: {error.message.rstrip('.')}") from error
        texts[row.parameter] = text
    return texts


def _unknown(key: str, rows: Mapping[str, Option]) -> str:
    """Return what is wrong with a key that the table does not have, and the remedy."""
    for row in rows.values():
        if f"--{key}" == row.flags.partition("/")[2]:
            return f"is the opposite of {row.key}: write {row.key} = true or false"
    if key in ("set", "task"):
        return "is unknown: write the task and its fields below [task]"
    if any(key == row.key for row in table.LAUNCH):
        return "is unknown: it belongs to [launch]"
    meant = habits.OPTIONS.get(key.lower(), "").split()[:1]
    for row in rows.values():
        if key == row.parameter.replace("_", "-") or [f"--{row.key}"] == meant:
            return f"is unknown: did you mean {row.key}?"
    return f"is unknown: {nearest(key.lower(), rows)}"


def _task(table: str, values: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """Return the task and the texts of its fields."""
    name = values.get("name")
    if name is not None and not (isinstance(name, str) and name.isprintable()):
        raise ValueError(f"{table} name is {name!r}: write the task in quotes")
    if "class" in values:  # no field has this name
        cure = f"write name = {json.dumps(values['class'])}"
        if name is not None:
            cure = 'remove it; a name such as "my_tasks/rings.py:Rings" has the file and the class'
        raise ValueError(f"{table} class is unknown: {cure}")
    inner = values.get("set", {})
    if not isinstance(inner, dict):
        raise ValueError(f"{table} set is not a table: write fields below [task.set]")
    fields = {}
    outer = {key: value for key, value in values.items() if key not in ("name", "set")}
    for place, found in ((table, outer), (table.replace("[task]", "[task.set]"), inner)):
        for key, value in found.items():
            if key in fields:
                raise ValueError(f"{place} {key} is also in [task]: drop one")
            fields[key] = text_of(f"{place} {key}", value)
    return name, fields


def _arguments(where: str, values: object, text: Callable[[str, list[Any]], str]) -> list[str]:
    """Return the values of --grid or --range: `lr=0.001,0.003` for `lr = [1e-3, 3e-3]`."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} is not a table: write {{lr = [1e-4, 1e-1]}}")
    for name, ends in values.items():
        if not isinstance(ends, list):
            raise ValueError(f"{where}: {name} is not an array: write {name} = [..., ...]")
    return [f"{name}={text(f'{where}: {name}', ends)}" for name, ends in values.items()]


def _grid(where: str, choices: list[Any]) -> str:
    texts = [text_of(f"{where}: a value", choice) for choice in choices]
    if not texts or not all(texts) or any("," in text for text in texts):
        raise ValueError(f"{where} = {choices}: write values that are not empty, without commas")
    return ",".join(texts)


def _range(where: str, ends: list[Any]) -> str:
    is_number = [type(end) in (int, float) for end in ends]
    if is_number != [True, True] and not (is_number == [True, True, False] and ends[2] == "log"):
        raise ValueError(f'{where} = {ends}: write [LOW, HIGH] or [LOW, HIGH, "log"]')
    return ":".join(text_of(where, end) for end in ends)


def text_of(where: str, value: object) -> str:
    """Return a single value of TOML as it would be on the command line.

    Raises:
        ValueError: it is an array, a table, a date or a time, or cannot be an argument. `where`
            names it.
    """
    if isinstance(value, list | dict):
        kind = "an array" if isinstance(value, list) else "a table"
        raise ValueError(f"{where} is {kind}: write one value")
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise ValueError(f"{where} is a date or a time: write it in quotes")
    text = str(value)
    if not text.isprintable():
        raise ValueError(f"{where} = {text!r} has a character that cannot be printed: remove it")
    if "${" in text:
        raise ValueError(
            f"{where} = {text}: the file has no variables such as ${{...}}: write the value"
        )
    return text
