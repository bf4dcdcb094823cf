"""Read what a tracker shows of a run: its name, settings, tags and rows of metrics."""

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from trainbox.contract.errors import StorageFailure, WrongUse
from trainbox.contract.files import read_object
from trainbox.contract.secret_rule import NOT_SHOWN, is_secret, without_secrets
from trainer.run.numbers import numbers

METRICS, MANIFEST, _CONFIG = "metrics.jsonl", "manifest.json", "config.json"
_TRIAL = re.compile(r"trial-\d+")
_DIGEST = re.compile(r"(?:sha256:)?[0-9a-f]{7,64}(?:-dirty)?")
# Entries of the manifest that become tags. `.` joins the names of nested objects.
_TAGS = re.compile(
    r"revision|build\..+|image_digest|python|packages\.(?:torch|trainbox)|cuda|cudnn|data\..+"
    r"|device\.(?:type|names)|machine\.cpu_model|plan\.(?:strategy|world_size)|script|init\..+"
)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*", re.ASCII)
_OTHER_CHARACTERS = re.compile(r"[^\w./ :-]", re.ASCII)
_LONGEST_NAME, _LONGEST_VALUE = 250, 500
_LARGEST_STEP, _LATEST_S = 2**53, 2**40


@dataclass(frozen=True)
class Run:
    """A run folder, without its metrics. `sweep` is the name of its sweep, or empty."""

    folder: Path
    id: str
    name: str
    sweep: str
    params: dict[str, str | float]
    tags: dict[str, str]


@dataclass(frozen=True)
class EntryRow:
    """The numbers of one entry of metrics.jsonl."""

    step: int
    time_unix_s: float
    values: dict[str, float]


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders among `folders`, and the trials of those that are sweeps.

    A trial that has not started is left out.

    Raises:
        WrongUse: A folder is neither a run nor a sweep.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if (folder / MANIFEST).is_file():
            found[folder] = None
            continue
        trials = sorted(path for path in folder.glob("trial-*") if _TRIAL.fullmatch(path.name))
        if not trials and not (folder / "study.journal").is_file():
            raise WrongUse(
                f"{folder} is not a run or a sweep: name a folder with {MANIFEST}, such as "
                "runs/digits-7d2c1a90"
            )
        found |= dict.fromkeys(path for path in trials if (path / MANIFEST).is_file())
    return list(found)


def read_run(folder: Path) -> Run:
    """Read config.json and manifest.json of a run.

    Raises:
        StorageFailure: A file is missing or damaged.
    """
    config, manifest = (_read(folder / name) for name in (_CONFIG, MANIFEST))
    is_script = config.get("kind") == "script"
    run_id = manifest.get("run_id")
    if not isinstance(run_id, str) or not re.fullmatch(r"[\w-]{1,64}", run_id, re.ASCII):
        raise StorageFailure(f"{folder / MANIFEST} has no valid run_id: restore the file")
    path = folder.absolute()
    sweep = path.parent.name if _TRIAL.fullmatch(path.name) else ""
    name = f"{sweep}/{path.name}" if sweep else path.name
    params = _of_script(config) if is_script else params_of(config)
    tags = tags_of(manifest) | ({"sweep": sweep} if sweep else {})
    return Run(folder, run_id, name, sweep, params, tags)


def row(entry: Mapping[str, Any]) -> EntryRow | None:
    """Return the finite numbers of an entry, or None if it has none.

    Texts and events of the hardware are left out.

    Raises:
        WrongUse: Two metrics would have the same name in a tracker.
    """
    step, when = entry.get("step"), entry.get("time_unix_s")
    if type(step) is not int or abs(step) > _LARGEST_STEP or entry.get("kind") == "health":
        return None
    found = numbers(entry)
    values = {_metric_name(name): _finite(found[name]) for name in sorted(found)}
    if len(values) < len(found):
        alike = Counter(map(_metric_name, found)).most_common(1)[0][0]
        both = " and ".join(name for name in sorted(found) if _metric_name(name) == alike)
        raise WrongUse(f"a tracker would show {both} as {alike}: rename one of these metrics")
    kept = {name: value for name, value in values.items() if value is not None}
    if not isinstance(when, int | float) or not 0 <= when < _LATEST_S:
        when = time.time()
    return EntryRow(step, float(when), kept) if kept else None


def _finite(number: float) -> float | None:
    try:
        return float(number) if math.isfinite(number) else None
    except OverflowError:  # a larger integer than any float
        return None


def _metric_name(name: str) -> str:
    """Return a name that each tracker accepts: a relative path of plain characters."""
    parts = _OTHER_CHARACTERS.sub("_", name).split("/")
    return "/".join(part for part in parts if part.strip(". "))[:_LONGEST_NAME].rstrip("/ ")


def params_of(config: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the settings of a task; its fields are named `task.NAME` as in TensorBoard."""
    fields = config.get("fields")
    flat = {name: value for name, value in config.items() if name != "fields" and value is not None}
    for name, value in (fields if isinstance(fields, dict) else {}).items():
        flat[f"task.{name}"] = value
    return {name: _shown(name, value) for name, value in flat.items()}


def _of_script(config: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the script's options `--name value` and `--name=value`, and all its arguments."""
    arguments = [text for text in config.get("arguments", []) if isinstance(text, str)]
    params: dict[str, str | float] = {}
    shown: list[str] = []
    option = ""  # the name of an option whose value may follow
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not _OPTION.fullmatch(name):
            text = str(_shown(option, argument))
            if option:
                params[option[:_LONGEST_NAME]] = text
            shown.append(text)
            option = ""
            continue
        option = "" if equals else name.lstrip("-")
        key = name.lstrip("-")[:_LONGEST_NAME]
        params[key] = _shown(name, value) if equals else "true"
        shown.append(f"{name}={_shown(name, value)}" if equals else name)
    return {**params, "arguments": " ".join(shown)[:_LONGEST_VALUE]}


def _shown(name: str, value: Any) -> str | float:
    """Return a value as a tracker may show it. A number of a task's setting is not a secret."""
    if isinstance(value, int | float):
        return value
    text = str(value)
    return NOT_SHOWN if is_secret(name, text) else without_secrets(text)[:_LONGEST_VALUE]


def tags_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a manifest that may be shown, without secrets."""
    tags = {}
    for name, value in _flat(manifest):
        if _TAGS.fullmatch(name) and value is not None and not isinstance(value, bool):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            tags[name] = text if _DIGEST.fullmatch(text) else without_secrets(text)[:_LONGEST_VALUE]
    if isinstance(sources := manifest.get("sources"), dict):
        listing = "".join(f"{name} {sources[name]}\n" for name in sorted(sources))
        tags["sources_sha256"] = sha256(listing.encode(errors="replace")).hexdigest()
    return {_metric_name(name): text for name, text in tags.items()}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageFailure(f"{path} cannot be read ({reason}): restore it") from error
