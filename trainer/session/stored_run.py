"""Read the settings and the manifest of a run, which may still train."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainbox.contract.config import Config, Settings, parse_config
from trainbox.contract.errors import WrongUse
from trainer.loop.settle import completed
from trainer.records.compare import edited_settings, listed_changes
from trainer.records.evidence import config_and_manifest


@dataclass(frozen=True)
class StoredRun:
    """The settings and the manifest of a run."""

    path: Path
    config: Config
    manifest: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "StoredRun":
        """Read the folder of a run, which may still train.

        Raises:
            WrongUse: A file is missing, damaged or edited, or the run is one of a script.
        """
        stored, described = config_and_manifest(path)
        config = parse_config(json.dumps(stored), path / "config.json")
        if edited := edited_settings(described, stored):
            raise WrongUse(
                f"{path}/config.json was edited after the run was started "
                f"({listed_changes(edited)}): restore it"
            )
        return cls(path, config, described)

    @property
    def run_id(self) -> str | None:
        """The id that the checkpoints of the run have, or None for a run of an earlier version."""
        found = self.manifest.get("run_id")
        return found if isinstance(found, str) else None

    @property
    def plan(self) -> Mapping[str, Any]:
        """The strategy and the number of processes of the newest start."""
        plans = [self.manifest["plan"], *(r["plan"] for r in self.manifest.get("resumes", []))]
        newest: Mapping[str, Any] = plans[-1]
        return newest

    def settings(self) -> Settings:
        """Return the settings of the run, with all open choices as the run made them.

        The size of a validation batch depends on the number of shards. A run that does not keep
        this number has one shard for each process of its newest start.
        """
        config = completed(self.config, int(self.plan["world_size"]))
        return Settings(**dataclasses.asdict(config) | {"batch_size_per_gpu": None})
