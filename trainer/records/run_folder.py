"""One run's folder: its lease, its JSON files, metrics.jsonl and digests.jsonl."""

import json
import math
from pathlib import Path
from typing import Any

from trainbox.errors import WrongUse
from trainbox.files.regular_files import read_object
from trainbox.files.sidecar import FIRST_CHECKPOINT
from trainbox.folders.record_folder import (
    CHECKPOINTS,
    CONFIG,
    DIGESTS,
    LOGS,
    MANIFEST,
    METRICS,
    WEIGHTS,
    RecordFolder,
    is_sweep,
)
from trainer.records.jsonl import read_entries


class RunFolder(RecordFolder):
    """The folder of one run. Only the first rank `writes`."""

    def __init__(self, path: Path, writes: bool) -> None:
        """Make the folder with its subfolders, and take its lease.

        Raises:
            StorageFailure: The folder cannot be written.
            WrongUse: Another process trains in it, or it is not a run and has files that a run
                would replace.
        """
        if writes:
            _refuse_files_of_others(path)
        super().__init__(path, writes, (CHECKPOINTS, LOGS))

    def read_config(self) -> dict[str, Any] | None:
        """Return the content of config.json, or None if the run is new.

        Raises:
            WrongUse: The file exists and cannot be read.
        """
        path = self.path / CONFIG
        try:
            return read_object(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WrongUse(
                f"{path} cannot be read ({reason}): restore it, or start a new run with --run NAME"
            ) from error

    def has_had_a_checkpoint(self) -> bool:
        """Return whether a checkpoint was ever completed in this folder."""
        return (self.path / FIRST_CHECKPOINT).exists()

    def lost_records(self, step: int, evaluated_step: int) -> list[str]:
        """Return the names of the records that have lost their entries up to `step`.

        metrics.jsonl is empty until the first entry, and has the validation at `evaluated_step`.

        Raises:
            StorageFailure: A record cannot be read.
        """
        metrics, digests = (read_entries(self.path / name) for name in (METRICS, DIGESTS))
        path = self.path / METRICS
        begun = bool(metrics) or (path.exists() and path.stat().st_size == 0)
        validated = {entry["step"] for entry in metrics if entry["kind"] == "validation"}
        is_lost = {
            METRICS: not begun or not validated.issuperset({evaluated_step} - {0}),
            DIGESTS: not digests,
        }
        return [name for name, lost in is_lost.items() if step and lost]

    def cut_records(self, step: int, evaluated_step: int) -> list[dict[str, Any]]:
        """Drop the entries after `step`, which the resumed run will write again.

        Validations are kept up to `evaluated_step`. The result is what is left of metrics.jsonl.

        Raises:
            StorageFailure: A record cannot be read or written.
        """
        # All hardware events are kept, because a resumed run does not repeat them.
        last = {"validation": evaluated_step, "health": math.inf}
        left = {}
        for name in (METRICS, DIGESTS):
            entries = read_entries(self.path / name)
            kept = [entry for entry in entries if entry["step"] <= last.get(entry["kind"], step)]
            if step == 0 and name == DIGESTS:
                kept = []  # the digests of the start are written again
            self.write_text(name, "".join(json.dumps(entry) + "\n" for entry in kept))
            left[name] = kept
        return left[METRICS]


def _refuse_files_of_others(path: Path) -> None:
    """Refuse a folder that is not a run, and has files that a run would replace."""
    if is_sweep(path):
        raise WrongUse(f"{path} is a sweep: choose another --run name")
    of_a_run = (CONFIG, MANIFEST, FIRST_CHECKPOINT)
    if any((path / name).exists() for name in of_a_run):
        return
    if found := [name for name in (METRICS, DIGESTS, WEIGHTS) if (path / name).is_file()]:
        raise WrongUse(
            f"{path} is not a run, and its {', '.join(found)} would be replaced: choose another "
            "--run name, or move the files away"
        )
