"""The sweep that the options of a command request."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import click

from trainbox.errors import WrongUse
from trainbox.files.parsing import parse_whole
from trainbox.options.config import Config, check
from trainbox.options.table import KEYS_OF_TRAIN, Option, swept_names
from trainer.load_task import task_class
from trainer.sweep import grid
from trainer.sweep.grid import Range, Sweep, Value
from trainer.sweep.script_template import Script, check_regex, check_template
from trainer.task_fields import TaskField, check_declared, fields_of_class, parse_fields

_CHECKED_TRIALS = 10_000
# The settings that a grid may vary, by their keys.
_SETTINGS = {row.key: row for row in KEYS_OF_TRAIN if grid.is_setting(row.parameter)}
_T = TypeVar("_T")
# Returns the name in the sweep and the values of a setting, from the option, its name and texts.
Convert = Callable[[str, str, Sequence[str]], tuple[str, list[Value]]]


def of_task(config: Config, device: str, values: Mapping[str, Any]) -> Sweep:
    """Return the sweep over the settings `config` of a task, with checked trials.

    Raises:
        WrongUse: an option of `values` is malformed, or options contradict each other.
    """
    # Other mistakes than in a field are found before the task imports torch.
    _sweep(config, values, _of_any_task(_texts), _of_any_task(_numbers))
    cls, swept = task_class(config.task), swept_names(values)
    check_declared(config.task, cls, [*config.fields, *swept])
    fields = fields_of_class(cls)
    needed = [dataclasses.replace(f, default=None) if f.name in swept else f for f in fields]
    config = dataclasses.replace(config, fields=parse_fields(config.task, needed, config.fields))

    def converted(given: str, name: str, texts: Sequence[str]) -> tuple[str, list[Value]]:
        return _converted(config.task, fields, given, name, texts)

    sweep = _sweep(config, values, converted, converted, config.fields)
    for number in range(min(_CHECKED_TRIALS, sweep.total) if sweep.sampler == "grid" else 0):
        check(sweep.trial_config(sweep.point(number), config.seed), device)
    return sweep


def of_script(script: Script, values: Mapping[str, Any]) -> Sweep:
    """Return the sweep over the values in the arguments of a script, as they are typed.

    Raises:
        WrongUse: an option of `values` is malformed, or the arguments do not use it.
    """

    sweep = _sweep(script, values, _texts, _numbers)
    if script.metric_regex is not None:
        check_regex(script.metric_regex, sweep.goal)
    check_template(script, sweep.grid, sweep.ranges, sweep.seeds)
    return sweep


def _texts(_given: str, name: str, texts: Sequence[str]) -> tuple[str, list[Value]]:
    return name, [*texts]


def _numbers(given: str, name: str, texts: Sequence[str]) -> tuple[str, list[Value]]:
    return name, [_number(given, text) for text in texts]


def _of_any_task(of_field: Convert) -> Convert:
    """Return what converts the values of a setting, and the values of a field by `of_field`."""

    def converted(given: str, written: str, texts: Sequence[str]) -> tuple[str, list[Value]]:
        row = _SETTINGS.get(written.replace("_", "-"))
        return (
            (row.parameter, _values(row, given, texts)) if row else of_field(given, written, texts)
        )

    return converted


def _sweep(
    what: Config | Script,
    values: Mapping[str, Any],
    of_grid: Convert,
    of_range: Convert,
    fields: Collection[str] = (),
) -> Sweep:
    grids = [parse_grid(text, of_grid) for text in values["grids"]]
    ranges = [parse_range(text, of_range) for text in values["ranges"]]
    rest = {name: values[name] for name in ("seeds", "sampler", "trials", "metric", "pruner")}
    sweep = Sweep(what, _once("--grid", grids, fields), _once("--range", ranges, fields), **rest)
    grid.check(sweep)
    return sweep


def parse_grid(text: str, convert: Convert) -> tuple[str, list[Value]]:
    """Return the name and the converted values of `--grid width=4,8,16`.

    Raises:
        WrongUse: another form, or the same value twice.
    """
    name, equals, rest = text.partition("=")
    texts = rest.split(",")
    if rest[:1] in ("[", "(") and rest[-1:] in ("]", ")"):
        raise WrongUse(f"--grid {text}: write no brackets, as in --grid {name}={rest[1:-1]}")
    if not (name and equals and all(texts)):
        raise WrongUse(f"--grid {text}: write NAME=VALUE,VALUE, as in --grid width=4,8,16")
    try:
        name, values = convert(f"--grid {text}", name, texts)
    except WrongUse as error:
        if re.fullmatch(r"[\d.e+-]+:[\d.e+-]+(:log)?", rest):
            raise WrongUse(
                f"--grid {text}: did you mean --range {text}, from which --sampler random draws?"
            ) from error
        raise
    if len({repr(value) for value in values}) < len(values):
        raise WrongUse(
            f"--grid {text}: a value is given twice: give each value once, and use --seeds to "
            "repeat combinations"
        )
    return name, values


def parse_range(text: str, convert: Convert) -> tuple[str, Range]:
    """Return the name and the converted range of `--range lr=1e-4:1e-1:log`.

    Raises:
        WrongUse: another form, an end that is not a number, or an empty range.
    """
    name, equals, rest = text.partition("=")
    ends, log = rest.removesuffix(":log").split(":"), rest.endswith(":log")
    if not (name and equals and len(ends) == 2 and all(ends)):
        raise WrongUse(
            f"--range {text}: write NAME=LOW:HIGH or NAME=LOW:HIGH:log, as in --range "
            "lr=1e-4:1e-1:log"
        )
    name, (low, high) = convert(f"--range {text}", name, ends)
    if isinstance(low, bool | str) or isinstance(high, bool | str):
        raise WrongUse(f"--range {text}: an end is not a number: use --grid for a choice of values")
    if not math.isfinite(high - low):
        raise WrongUse(f"--range {text} is not finite: give ends that are closer to each other")
    if low >= high or (log and low <= 0):
        and_above = ", and above 0" if log else ""
        raise WrongUse(
            f"--range {text} is empty: give a low end that is below the high end{and_above}"
        )
    return name, Range(low, high, log)


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
) -> tuple[str, list[Value]]:
    """Return the name of a field or of a setting (`lr` is learning_rate), and its values.

    The values are checked in the same way as values of --set and of the options.

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
    if row is None and written == "seed" and all(field.name != written for field in fields):
        count = f"--seeds {len(texts)}" if given.startswith("--grid") else "--seeds N"
        raise WrongUse(f"{given}: the option is {count}, which counts from --seed {texts[0]}")
    if row is None:
        optional = [dataclasses.replace(field, default=None) for field in fields]
        shown = {written: given}
        return written, [
            parse_fields(task, optional, {written: text}, shown)[written] for text in texts
        ]
    return row.parameter, _values(row, given, texts)


def _values(row: Option, given: str, texts: Sequence[str]) -> list[Value]:
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


def _number(given: str, text: str) -> Value:
    try:
        return parse_whole(text)
    except OverflowError as error:
        raise WrongUse(f"{given}: {error}: give a smaller one") from None
    except ValueError:
        with contextlib.suppress(ValueError):
            return float(text)
    return text
