"""The settings of a run or a sweep as the file of an experiment."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainbox.contract.config import Config
from trainbox.contract.errors import WrongUse
from trainbox.contract.options import KEYS_OF_TRAIN
from trainbox.contract.record_folder import CONFIG
from trainer.parallel.strategy import STRATEGIES
from trainer.run.run_record import RunRecord, object_in
from trainer.sweep.grid import Sweep
from trainer.sweep.script import Script

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_OPTIONS = {row.key: row for row in KEYS_OF_TRAIN}
# The keys of [task] that are not fields.
_RESERVED = ("name", "set")
# The strategies that a run has without --strategy, by its number of processes.
_USUAL_STRATEGIES = ("single", "ddp")


def settings_text(run: Path, as_toml: bool) -> str:
    """Return the settings of a run as JSON, or those of a run or a sweep as an experiment's file.

    Raises:
        WrongUse: the folder is not one of a run of a task, a file is missing, damaged or edited,
            or a value cannot be in the file.
    """
    if (run / "study.journal").is_file():
        if not as_toml:
            raise WrongUse(
                f"config {run}: this is a sweep: add --toml, or name one of its trials, such as "
                f"{run}/trial-00000"
            )
        from trainer.sweep.study import open_study  # imports Optuna

        study = open_study(None, run, None)
        return sweep_as_experiment(study.sweep, study.total, run)
    if object_in(run / CONFIG).get("kind") == "script":
        raise _of_script(run, "its arguments are in config.json")
    record = RunRecord.open(run)
    if as_toml:
        return as_experiment(record.config, run, record.manifest["plan"])
    return record.config.to_json()


def as_experiment(config: Config, run: Path, plan: Mapping[str, Any]) -> str:
    """Return the file of an experiment that has the settings of `config`.

    `plan` is the launch plan in the manifest of `run`.

    Raises:
        WrongUse: a value cannot be in the file.
    """
    try:
        return "\n".join(_lines(config, run, plan)) + "\n"
    except ValueError as error:
        raise WrongUse(f"config {run} --toml: {error}") from error


def sweep_as_experiment(sweep: Sweep, total: int, folder: Path) -> str:
    """Return the file of an experiment that has the sweep of `total` trials in `folder`.

    Raises:
        WrongUse: it is a sweep of a script, or a value cannot be in the file.
    """
    if isinstance(sweep.config, Script):
        raise _of_script(folder, "give the command again")
    lines = [*_heading(folder), *_of_config(sweep.config), *_of_sweep(sweep, total)]
    return "\n".join(lines) + "\n"


def _of_script(folder: Path, remedy: str) -> WrongUse:
    return WrongUse(f"config {folder}: a script has no settings that Trainbox knows: {remedy}")


def _of_sweep(sweep: Sweep, total: int) -> Iterator[str]:
    yield from ("", "[sweep]")
    if sweep.sampler == "grid":
        yield f"seeds = {total // math.prod(map(len, sweep.grid.values()))}"
    else:
        yield f"trials = {total}"
    for name in ("sampler", "metric", "pruner"):
        if (value := getattr(sweep, name)) is not None:
            yield f"{name} = {_value(name, value)}"
    grid = {name: list(values) for name, values in sweep.grid.items()}
    ranges = {
        name: [ends.low, ends.high, *(["log"] if ends.log else [])]
        for name, ends in sweep.ranges.items()
    }
    keys = {option.parameter: key for key, option in _OPTIONS.items()}
    for table, arrays in (("grid", grid), ("range", ranges)):
        if arrays:
            items = (
                f"{_key(keys.get(name, name))} = [{', '.join(_value(name, v) for v in values)}]"
                for name, values in arrays.items()
            )
            yield f"{table} = {{{', '.join(items)}}}"


def _lines(config: Config, run: Path, plan: Mapping[str, Any]) -> Iterator[str]:
    yield from _heading(run)
    if plan.get("reason"):
        yield f"# It was launched with: {json.dumps(plan['reason'])[1:-1]}"
    yield from _of_config(config)
    if plan.get("strategy") in STRATEGIES.keys() - set(_USUAL_STRATEGIES):
        yield from ("", "[launch]", f"strategy = {_value('strategy', plan['strategy'])}")


def _heading(folder: Path) -> Iterator[str]:
    yield f"# The settings of {json.dumps(str(folder))[1:-1]}."


def _of_config(config: Config) -> Iterator[str]:
    yield from ("", "[task]", f"name = {_value('name', config.task)}")
    for name, value in config.fields.items():
        if name not in _RESERVED:
            yield f"{_key(name)} = {_value(name, value)}"
    yield from ("", "[train]")
    settings = dataclasses.asdict(config)
    for key, option in _OPTIONS.items():
        setting = settings.get(option.parameter)
        if isinstance(setting, list):
            if setting:
                yield f"{key} = [{', '.join(_value(key, each) for each in setting)}]"
        elif setting is not None:
            yield f"{key} = {_value(key, setting)}"
    reserved = {name: value for name, value in config.fields.items() if name in _RESERVED}
    if reserved:
        yield from ("", "[task.set]")
    for name, value in reserved.items():
        yield f"{name} = {_value(name, value)}"


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _value("the name of a field", name)


def _value(name: str, value: object) -> str:
    """Return a value as TOML.

    Raises:
        ValueError: it is not a text that can be printed, a number, true or false.
    """
    if isinstance(value, str) and value.isprintable():
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    raise ValueError(f"{name} is {value!r}, which the file cannot have: use config.json")
