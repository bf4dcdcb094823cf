"""Read the file of an experiment, such as exp.toml: its tables, and their values as text.

The trainer reads [task], [train] and [sweep], and the launcher reads [launch]. Both parse the texts
as on the command line.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click

from trainbox.contract.files import read_text
from trainbox.contract.variables import LAUNCH_NAMES

SUFFIX = ".toml"  # of the file's name
TABLES = ("task", "train", "launch", "sweep")
# The launcher reads this option of [sweep].
PER_GPU = "per-gpu"
_MOST_BYTES = 2**20


def read_experiment(path: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the tables of the file, and the SHA-256 of its text.

    A table that the file lacks is empty. The keys of options have `-` for `_`.

    Raises:
        ValueError: the file cannot be read, is not TOML, or has an unknown table. The message has
            one line.
    """
    import hashlib
    import tomllib

    try:
        text = read_text(path, _MOST_BYTES)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--config {path} is not TOML: {error}") from error
    try:
        tables = tomllib.loads(text.removeprefix("\ufeff"))  # some editors write this mark
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--config {path} is not TOML: {error}") from error
    for name, values in tables.items():
        if not isinstance(values, dict):
            raise ValueError(
                f"{path}: {name} is outside of a table: write it below [task], [train], [launch] "
                "or [sweep]"
            )
        if name not in TABLES:
            known = [f"[{table}]" for table in TABLES]
            raise ValueError(f"{path}: [{name}] is unknown: {nearest(f'[{name}]', known)}")
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


def option_defaults(
    ctx: click.Context, table: str, values: Mapping[str, Any], options: Mapping[str, click.Option]
) -> dict[str, str | list[str]]:
    """Return the values of a table as on the command line, by the names of the parameters.

    An option that can be repeated has a list, from an array or from a single value.

    `table` is the file and the table for messages, such as `exp.toml: [train]`. `options` has the
    option of each key.

    Raises:
        ValueError: a key is unknown, or a value is not valid for its option.
    """
    texts = _option_texts(table, values, options)
    for key, text in texts.items():
        try:
            options[key].type_cast_value(ctx, text)
        except click.BadParameter as error:
            raise ValueError(f"{table} {key} = {text}: {error.message.rstrip('.')}") from error
    return {str(options[key].name): text for key, text in texts.items()}


def _option_texts(
    table: str, values: Mapping[str, Any], options: Mapping[str, click.Option]
) -> dict[str, str | list[str]]:
    """Return the values of a table as on the command line, by their keys."""
    opposites = {
        name.lstrip("-"): key for key, option in options.items() for name in option.secondary_opts
    }
    texts: dict[str, str | list[str]] = {}
    for key, value in values.items():
        if key in opposites:
            raise ValueError(
                f"{table} {key} is the opposite of {opposites[key]}: write {opposites[key]} = "
                "true or false"
            )
        if key not in options:
            is_launch = not table.endswith("[launch]") and _variable(key) in LAUNCH_NAMES
            fix = "it belongs to [launch]" if is_launch else nearest(key, options)
            if key in ("set", "task"):
                fix = "write the task and its fields below [task]"
            raise ValueError(f"{table} {key} is unknown: {fix}")
        if options[key].multiple:
            each = value if isinstance(value, list) else [value]
            texts[key] = [text_of(f"{table} {key}", one) for one in each]
            continue
        texts[key] = text_of(f"{table} {key}", value)
        if options[key].is_flag != isinstance(value, bool):
            fix = "true or false, without quotes" if options[key].is_flag else "a value"
            raise ValueError(f"{table} {key} = {texts[key]}: write {fix}")
    return texts


def _variable(key: str) -> str:
    return key.replace("-", "_").upper()


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
    try:
        text = str(value)
    except ValueError as error:  # a hexadecimal number with thousands of digits
        raise ValueError(f"{where} is too large: {error}") from error
    if not text.isprintable():
        raise ValueError(f"{where} = {text!r} has a character that cannot be printed: remove it")
    return text


def nearest(name: str, known: Collection[str]) -> str:
    """Return a question with the known name that is nearest to `name`, or the list of names."""
    import difflib

    found = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"did you mean {found[0]}?" if found else f"use some of {', '.join(known)}"
