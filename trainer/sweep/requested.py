"""The sweep that the options of a command request."""

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import click

from trainbox.contract.config import Config, check
from trainbox.contract.errors import WrongUse
from trainbox.contract.options import KEYS_OF_TRAIN, Option
from trainbox.contract.parsing import parse_whole
from trainbox.contract.task_fields import TaskField, parse_fields, static_fields
from trainer.load_task import load_task, loaded_fields
from trainer.sweep import grid
from trainer.sweep.grid import Sweep
from trainer.sweep.script import Script, check_regex, check_template

_CHECKED_TRIALS = 10_000
# The settings that a grid may vary, by their keys.
_SETTINGS = {row.key: row for row in KEYS_OF_TRAIN if grid.is_setting(row.parameter)}
_T = TypeVar("_T")


def of_task(config: Config, device: str, values: Mapping[str, Any]) -> Sweep:
    """Return the sweep over the settings `config` of a task, with checked trials.

    Raises:
        WrongUse: an option of `values` is malformed, or options contradict each other.
    """
    fields = static_fields(config.task)
    if fields is None:
        fields = loaded_fields(type(load_task(config.task, {})))
    grids, ranges = [], []
    for text in values["grids"]:
        written, texts = grid.parse_grid(text)
        name, found = _converted(config.task, fields, f"--grid {text}", written, texts)
        grids.append((name, grid.choices(text, found)))
    for text in values["ranges"]:
        written, low, high, log = grid.parse_range(text)
        name, ends = _converted(config.task, fields, f"--range {text}", written, [low, high])
        ranges.append((name, grid.between(text, ends[0], ends[1], log)))
    sweep = _sweep(config, grids, ranges, values, config.fields)
    for number in range(min(_CHECKED_TRIALS, sweep.total) if sweep.sampler == "grid" else 0):
        check(sweep.trial_config(sweep.point(number), config.seed), device)
    return sweep


def of_script(script: Script, values: Mapping[str, Any]) -> Sweep:
    """Return the sweep over the values in the arguments of a script, as they are typed.

    Raises:
        WrongUse: an option of `values` is malformed, or the arguments do not use it.
    """
    grids, ranges = [], []
    for text in values["grids"]:
        name, texts = grid.parse_grid(text)
        grids.append((name, grid.choices(text, list(texts))))
    for text in values["ranges"]:
        name, low, high, log = grid.parse_range(text)
        ends = [_number(f"--range {text}", end) for end in (low, high)]
        ranges.append((name, grid.between(text, ends[0], ends[1], log)))
    sweep = _sweep(script, grids, ranges, values)
    if script.metric_regex is not None:
        check_regex(script.metric_regex, sweep.goal)
    check_template(script, sweep.grid, sweep.ranges, sweep.seeds)
    return sweep


def _sweep(
    what: Config | Script,
    grids: Sequence[tuple[str, list[grid.Value]]],
    ranges: Sequence[tuple[str, grid.Range]],
    values: Mapping[str, Any],
    fields: Collection[str] = (),
) -> Sweep:
    rest = {name: values[name] for name in ("seeds", "sampler", "trials", "metric", "pruner")}
    sweep = Sweep(what, _once("--grid", grids, fields), _once("--range", ranges, fields), **rest)
    grid.check(sweep)
    return sweep


def _once(option: str, named: Sequence[tuple[str, _T]], fields: Collection[str]) -> dict[str, _T]:
    """Return `named` as a mapping.

    Raises:
        WrongUse: A name is given twice, or is also in `fields`, which --set has given.
    """
    for number, (name, _) in enumerate(named):
        if name in dict(named[:number]) or name in fields:
            raise WrongUse(f"{option} {name}=...: {name} is given twice: drop one of the two")
    return dict(named)


def _converted(
    task: str, fields: Sequence[TaskField], given: str, written: str, texts: Sequence[str]
) -> tuple[str, list[grid.Value]]:
    """Return the name of a field or of a setting (`lr` is learning_rate), and its values.

    The values are checked as those of --set and of the options are.

    Raises:
        WrongUse: The name is unknown, a value is not valid, or the option cannot be swept.
    """
    row = _SETTINGS.get(written.replace("_", "-"))
    if any(field.name == written for field in fields):
        if grid.is_setting(written):
            raise WrongUse(
                f"{given}: the field {written} of task {task} has the name of an option: "
                "give the field another name"
            )
        row = None
    if row is None:
        optional = [dataclasses.replace(field, default=None) for field in fields]
        shown = {written: given}
        return written, [
            parse_fields(task, optional, {written: text}, shown)[written] for text in texts
        ]
    return row.parameter, _values(row, given, texts)


def _values(row: Option, given: str, texts: Sequence[str]) -> list[grid.Value]:
    flag = f"--{row.key}"
    if row.type is bool:
        raise WrongUse(f"{given}: {flag} is a switch without values: choose another option")
    if row.repeats:
        raise WrongUse(f"{given}: {flag} can be repeated, so it cannot be swept: use {flag} alone")
    option, ctx = row.click(), click.get_current_context()
    try:
        return [option.type_cast_value(ctx, text) for text in texts]
    except click.BadParameter as error:
        raise WrongUse(f"{given}: {error.message.rstrip('.')}") from error


def _number(given: str, text: str) -> grid.Value:
    try:
        return parse_whole(text)
    except OverflowError as error:
        raise WrongUse(f"{given}: {error}: give a smaller one") from None
    except ValueError:
        with contextlib.suppress(ValueError):
            return float(text)
    return text
