"""Choose the default name of a run."""

from pathlib import Path

from trainbox.contract.config import Config
from trainbox.contract.files import read_object
from trainer.parallel.strategy import Strategy


def default_name(config: Config, strategy: Strategy, runs_dir: Path) -> str:
    """Return a name from the task and a digest of the settings.

    If this start cannot have the bits of the run with this name, the name gets a suffix.
    """
    name = f"{config.task.rpartition(':')[2].lower()}-{config.fingerprint()}"
    if not strategy.keeps_shards:
        return f"{name}-{strategy.name}"
    world = strategy.world
    shards = world.from_first(_shards_of(runs_dir / name))
    if config.shards is not None or shards is None or shards >= world.world_size:
        return name
    return f"{name}-x{world.world_size}"


def _shards_of(path: Path) -> int | None:
    """Return the number of shards of the run in `path`, or None if it is not recorded."""
    try:
        shards = read_object(path / "config.json").get("shards")
    except (OSError, ValueError):
        return None
    return shards if isinstance(shards, int) else None
