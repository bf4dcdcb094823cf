"""The default name of a run: its task, its settings, and a digest of them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainbox.disclosure.secret_rule import is_secret
from trainbox.files.regular_files import object_if_valid
from trainbox.options.config import Config
from trainbox.options.run_name import short_digest
from trainbox.options.table import KEYS_OF_TRAIN
from trainer.parallel.strategy import Strategy

_MOST_CHARS = 60  # also with the suffixes of a strategy or of several processes
_MOST_OF_A_PART = 24
_SUFFIX_CHARS = 8
_DIGITS = 4  # of the digest
_KEYS = {row.parameter: row.key.replace("-", "_") for row in KEYS_OF_TRAIN}


def default_name(config: Config, strategy: Strategy, runs_dir: Path) -> str:
    """Return a name from the task and the settings, such as `digits-width64-lr0.01-23b0`.

    The same command has the same name. If this start cannot have the bits of the run with this
    name, the name gets a suffix.
    """
    name = name_of(config.identity())
    if not strategy.rules.keeps_shards:
        return f"{name}-{strategy.name}"
    world = strategy.world
    shards = world.from_first(_shards_of(runs_dir / name))
    if config.shards is not None or shards is None or shards >= world.world_size:
        return name
    return f"{name}-x{world.world_size}"


def name_of(identity: Mapping[str, Any]) -> str:
    """Return the name for `Config.identity()`. Settings that do not fit are only in the digest."""
    settings = {name: value for name, value in identity.items() if name not in ("task", "fields")}
    named = {**identity.get("fields", {}), **{_KEYS.get(n, n): v for n, v in settings.items()}}
    digest = short_digest(identity)[:_DIGITS]
    name = _plain(str(identity["task"]).rpartition(":")[2].lower())
    most = _MOST_CHARS - _SUFFIX_CHARS - 1 - _DIGITS
    for key, value in named.items():
        part = _part(key, value)
        if part and len(name) + 1 + len(part) <= most:
            name += f"-{part}"
    return f"{name}-{digest}"


def _part(key: str, value: Any) -> str:
    """Return `width64` for width=64; nothing for a value that is long, secret or not plain."""
    if isinstance(value, bool):
        text = "" if value else "=no"
    elif isinstance(value, float):
        text = f"{value:g}"
    else:
        text = "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if value is None or is_secret(key, text):
        return ""
    part = _plain(f"{key}{text}")
    return part if len(part) <= _MOST_OF_A_PART else ""


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+=]+", "_", text).strip("_.")


def _shards_of(path: Path) -> int | None:
    """Return the number of shards of the run in `path`, or None if it is not recorded."""
    shards = (object_if_valid(path / "config.json") or {}).get("shards")
    return shards if isinstance(shards, int) else None
