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
from trainbox.contract.record_folder import CONFIG, is_sweep
from trainbox.contract.strategies import STRATEGY_RULES
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
    if is_sweep(run):
        if not as_toml:
            raise WrongUse(
                f"config {run}: this is a sweep: add --toml, or name one of its trials, such as "
                f"{run}/trial-00000"
            )
        from trainer.sweep.study import open_study  # imports Optuna

        study = open_study(run, None)
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
    reason = plan.get("reason")
    note = f"\n# It was launched with: {json.dumps(reason)[1:-1]}" if reason else ""
    strategy = plan.get("strategy")
    is_unusual = strategy in STRATEGY_RULES.keys() - set(_USUAL_STRATEGIES)
    return _document(run, config, {"launch": {"strategy": strategy} if is_unusual else {}}, note)


def sweep_as_experiment(sweep: Sweep, total: int, folder: Path) -> str:
    """Return the file of an experiment that has the sweep of `total` trials in `folder`.

    Raises:
        WrongUse: it is a sweep of a script, or a value cannot be in the file.
    """
    if isinstance(sweep.config, Script):
        raise _of_script(folder, "give the command again")
    if sweep.sampler == "grid":
        table: dict[str, Any] = {"seeds": total // math.prod(map(len, sweep.grid.values()))}
    else:
        table = {"trials": total}
    keys = {option.parameter: key for key, option in _OPTIONS.items()}
    ranges = {
        name: [ends.low, ends.high, *(["log"] if ends.log else [])]
        for name, ends in sweep.ranges.items()
    }
    table |= {name: getattr(sweep, name) for name in ("sampler", "metric", "pruner")}
    table |= {
        name: {keys.get(name, name): values for name, values in arrays.items()}
        for name, arrays in (("grid", sweep.grid), ("range", ranges))
    }
    return _document(folder, sweep.config, {"sweep": _given(table)})


def _of_script(folder: Path, remedy: str) -> WrongUse:
    return WrongUse(f"config {folder}: a script has no settings that Trainbox knows: {remedy}")


def _document(
    folder: Path, config: Config, more: Mapping[str, Mapping[str, Any]], note: str = ""
) -> str:
    """Return the tables of `config` and `more` tables as TOML, without empty ones."""
    settings, fields = _given(dataclasses.asdict(config)), config.fields
    tables: dict[str, Mapping[str, Any]] = {
        "task": {"name": config.task} | {n: v for n, v in fields.items() if n not in _RESERVED},
        "train": {
            key: settings[option.parameter]
            for key, option in _OPTIONS.items()
            if option.parameter in settings
        },
        "task.set": {n: v for n, v in fields.items() if n in _RESERVED},
        **more,
    }
    lines = [f"# The settings of {json.dumps(str(folder))[1:-1]}.{note}"]
    try:
        for name, table in tables.items():
            if table:
                lines += ["", f"[{name}]", *_items(table)]
    except ValueError as error:
        raise WrongUse(f"config {folder} --toml: {error}") from error
    return "\n".join(lines) + "\n"


def _given(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value not in (None, [], {})}


def _items(table: Mapping[str, Any]) -> Iterator[str]:
    return (f"{_key(name)} = {_value(name, value)}" for name, value in table.items())


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _value("the name of a field", name)


def _value(name: str, value: object) -> str:
    """Return a value as TOML.

    Raises:
        ValueError: it has something else than printable texts, numbers, true, false and lists.
    """
    if isinstance(value, list):
        return f"[{', '.join(_value(name, each) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(_items(value))}}}"
    if isinstance(value, str) and value.isprintable():
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    raise ValueError(f"{name} is {value!r}, which the file cannot have: use config.json")
