"""Read the tables [task], [train] and [sweep] of an experiment's file for a command."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from trainbox.contract.errors import WrongUse
from trainbox.contract.experiment import PER_GPU, option_defaults, read_experiment, text_of
from trainer.cli.parameters import SWEEP, Option

# Keys of [train] that `train` uses, and `sweep` does not.
_OF_ONE_TRAINING = ("mirror", "profile", "resume", "run")
# They are in [task], or name the file itself.
_NOT_KEYS = ("config", "set")


def apply_experiment(ctx: click.Context, path: Path) -> None:
    """Take the values of the file as defaults of the command's options.

    The task's fields are in `ctx.meta`: their values in `fields`, and in `written` how messages
    name them.

    Raises:
        WrongUse: the file, a key or a value is wrong. The message has one line.
    """
    try:
        tables, _ = read_experiment(path)
        task, fields, written = _task(f"{path}: [task]", tables["task"])
        defaults: dict[str, Any] = {} if task is None else {"task": task}
        sweeps = ctx.command.name == "sweep"
        defaults |= _options(
            ctx, f"{path}: [train]", tables["train"], False, _OF_ONE_TRAINING if sweeps else ()
        )
        if sweeps:
            defaults |= _sweep(ctx, f"{path}: [sweep]", tables["sweep"])
    except ValueError as error:
        raise WrongUse(str(error)) from error
    ctx.meta.update(fields=fields, written=written, experiment=path)
    ctx.default_map = defaults


def _task(
    table: str, values: Mapping[str, Any]
) -> tuple[str | None, dict[str, str], dict[str, str]]:
    """Return the task, the texts of its fields, and what messages call each field."""
    name = values.get("name")
    if name is not None and not (isinstance(name, str) and name.isprintable()):
        raise ValueError(f"{table} name is {name!r}: write the task in quotes")
    inner = values.get("set", {})
    if not isinstance(inner, dict):
        raise ValueError(f"{table} set is not a table: write fields below [task.set]")
    fields, written = {}, {}
    outer = {key: value for key, value in values.items() if key not in ("name", "set")}
    for place, found in ((table, outer), (table.replace("[task]", "[task.set]"), inner)):
        for key, value in found.items():
            if key in fields:
                raise ValueError(f"{place} {key} is also in [task]: drop one")
            fields[key] = text_of(f"{place} {key}", value)
            written[key] = f"{place} {key} = {fields[key]}"
    return name, fields, written


def _options(
    ctx: click.Context,
    table: str,
    values: Mapping[str, Any],
    of_sweep: bool,
    unused: tuple[str, ...],
) -> dict[str, str | list[str]]:
    """Return the texts of a table by the names of the parameters. Each is a valid value.

    The keys in `unused` may be there, and are left out.
    """
    options = {
        param.opts[0].lstrip("-"): param
        for param in ctx.command.params
        if isinstance(param, Option) and param.section and (param.section == SWEEP) == of_sweep
    }
    for key in _NOT_KEYS:
        options.pop(key, None)
    used = {key: value for key, value in values.items() if key not in unused}
    return option_defaults(ctx, table, used, options)


def _sweep(ctx: click.Context, table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    drawn = {
        "grids": _arguments(f"{table} grid", values.get("grid", {}), _grid),
        "ranges": _arguments(f"{table} range", values.get("range", {}), _range),
    }
    rest = {key: value for key, value in values.items() if key not in ("grid", "range")}
    return _options(ctx, table, rest, True, (PER_GPU,)) | drawn


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
