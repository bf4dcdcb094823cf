"""Read what a tracker shows of a run: its name, settings, tags and rows of metrics."""

import itertools
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from trainbox.contract.entries import step_of
from trainbox.contract.errors import WrongUse
from trainbox.contract.record_folder import CONFIG, MANIFEST, is_sweep
from trainbox.contract.secret_rule import arguments_without_secrets, without_secrets
from trainer.run.compare import flat, shown_value
from trainer.run.jsonl import numbers
from trainer.run.run_record import RunRecord, object_in

_TRIAL = re.compile(r"trial-\d+")
_DIGEST = re.compile(r"(?:sha256:)?[0-9a-f]{7,64}(?:-dirty)?")
# Entries of the manifest that become tags. `.` joins the names of nested objects.
_TAGS = re.compile(
    r"revision|build\..+|image_digest|python|packages\.(?:torch|trainbox)|cuda|cudnn|data\..+"
    r"|device\.(?:type|names)|machine\.cpu_model|plan\.(?:strategy|world_size)|script|init\..+"
)
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.ASCII | re.DOTALL)
_OTHER_CHARACTERS = re.compile(r"[^\w./ :-]", re.ASCII)
_LONGEST_NAME, _LONGEST_VALUE = 250, 500
_LATEST_S = 2**40


@dataclass(frozen=True)
class Run:
    """A run folder, without its metrics. A trial has the tag `sweep`."""

    folder: Path
    id: str
    name: str
    params: dict[str, str | float]
    tags: dict[str, str]


@dataclass(frozen=True)
class EntryRow:
    """The numbers of one entry of metrics.jsonl."""

    step: int
    time_unix_s: float
    values: dict[str, float]


def runs_in(folder: Path) -> list[Path] | None:
    """Return the folder of a run, or the trials of a sweep that have started, or None."""
    if (folder / MANIFEST).is_file():
        return [folder]
    trials = sorted(path for path in folder.glob("trial-*") if _TRIAL.fullmatch(path.name))
    if not trials and not is_sweep(folder):
        return None
    return [path for path in trials if (path / MANIFEST).is_file()]


def read_run(folder: Path) -> Run:
    """Read config.json and manifest.json of a run.

    Raises:
        WrongUse: A file is missing, damaged or edited.
    """
    config, manifest = (object_in(folder / name) for name in (CONFIG, MANIFEST))
    if config.get("kind") == manifest.get("kind") == "script":
        params = _of_script(config)
    else:
        record = RunRecord.open(folder)
        params, manifest = params_of(record.values), dict(record.manifest)
    run_id = manifest.get("run_id")
    if not isinstance(run_id, str) or not re.fullmatch(r"[\w-]{1,64}", run_id, re.ASCII):
        raise WrongUse(f"{folder}/{MANIFEST} is damaged (run_id is malformed): restore it")
    path = folder.absolute()
    sweep = path.parent.name if _TRIAL.fullmatch(path.name) else ""
    name = f"{sweep}/{path.name}" if sweep else path.name
    tags = tags_of(manifest) | ({"sweep": sweep} if sweep else {})
    return Run(folder, run_id, name, params, tags)


def row(entry: Mapping[str, Any]) -> EntryRow | None:
    """Return the finite numbers of an entry, or None if it has none.

    Texts and events of the hardware are left out.

    Raises:
        WrongUse: Two metrics would have the same name in a tracker.
    """
    step, when = step_of(entry), entry.get("time_unix_s")
    if step is None or entry.get("kind") == "health":
        return None
    values: dict[str, float] = {}
    names: dict[str, str] = {}
    for name, number in sorted(numbers(entry).items()):
        shown = _metric_name(name)
        if (other := names.setdefault(shown, name)) != name:
            raise WrongUse(
                f"a tracker would show {other} and {name} as {shown}: rename one of these metrics"
            )
        if abs(number) <= sys.float_info.max:  # false for NaN, and for a larger integer
            values[shown] = float(number)
    if not isinstance(when, int | float) or not 0 <= when < _LATEST_S:
        when = time.time()
    return EntryRow(step, float(when), values) if values else None


def _metric_name(name: str) -> str:
    """Return a name that each tracker accepts: a relative path of plain characters."""
    parts = _OTHER_CHARACTERS.sub("_", name).split("/")
    return "/".join(part for part in parts if part.strip(". "))[:_LONGEST_NAME].rstrip("/ ")


def params_of(config: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the settings of a task; its fields are named `task.NAME` as in TensorBoard."""
    settings = {name: value for name, value in config.items() if value is not None}
    fields = {f"task.{name}": value for name, value in settings.pop("fields", {}).items()}
    return {name: _shown(name, value) for name, value in (settings | fields).items()}


def _shown(name: str, value: Any) -> str | float:
    """Return a setting as a tracker may show it. A number is not a secret."""
    if isinstance(value, int | float):
        return value
    text: str = shown_value(name, str(value))
    return text[:_LONGEST_VALUE]


def _of_script(config: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the script's options `--name value` and `--name=value`, and all its arguments."""
    arguments = [text for text in config.get("arguments", []) if isinstance(text, str)]
    shown = arguments_without_secrets(arguments)
    params: dict[str, str | float] = {}
    for argument, following in itertools.pairwise([*shown, "--"]):
        if option := _OPTION.fullmatch(argument):
            name, value = option.groups()
            has_value = not _OPTION.fullmatch(following) and following != "--"
            value = value or (following if has_value else "true")
            params[name[:_LONGEST_NAME]] = value[:_LONGEST_VALUE]
    return {**params, "arguments": " ".join(shown)[:_LONGEST_VALUE]}


def tags_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a manifest that may be shown, without secrets."""
    tags = {}
    for name, value in flat(manifest).items():
        if _TAGS.fullmatch(name) and value is not None and not isinstance(value, bool):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            tags[name] = text if _DIGEST.fullmatch(text) else without_secrets(text)[:_LONGEST_VALUE]
    if isinstance(sources := manifest.get("sources"), dict):
        listing = "".join(f"{name} {sources[name]}\n" for name in sorted(sources))
        tags["sources_sha256"] = sha256(listing.encode(errors="replace")).hexdigest()
    return {_metric_name(name): text for name, text in tags.items()}
