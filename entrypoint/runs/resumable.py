"""Whether the same command can resume a training, from the names and the sizes of its files.

A start of the training also compares contents: see trainer/records/checkpoint_files.py.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

from trainbox.files.entries import parsed, step_of
from trainbox.files.regular_files import open_from
from trainbox.files.sidecar import (
    FIRST_CHECKPOINT,
    checkpoint_path,
    names_in,
    sidecar_if_valid,
    steps_of,
)
from trainbox.folders.record_folder import CHECKPOINTS, DIGESTS, WEIGHTS

_ENDS = (".json", ".json.tmp")  # A start finishes a save that lacks only the rename of its sidecar.


class ListedCheckpoints:
    """The checkpoints of a run. Their folder is listed once, and each sidecar is read once.

    Attributes:
        steps: The steps that have a sidecar, oldest first.
        newest: The step of the newest sidecar, or 0.
    """

    def __init__(self, run: Path, run_id: object) -> None:
        """List the checkpoints of the run with the id `run_id`, which its manifest has."""
        self._run, self._run_id, self._folder = run, run_id, run / CHECKPOINTS
        self._names = names_in(self._folder)
        self.steps = steps_of(self._names)
        self.newest = self.steps[-1] if self.steps else 0
        self.sidecar = cache(self._sidecar)

    def _sidecar(self, step: int, end: str = ".json") -> dict[str, Any] | None:
        """Return the fields of the sidecar of `step`, or None if it is missing or damaged."""
        path = checkpoint_path(self._folder, step, end)
        return sidecar_if_valid(path) if path.name in self._names else None

    def paths(self, step: int) -> tuple[Path, Path]:
        """Return the file and the sidecar of the checkpoint of `step`."""
        file = checkpoint_path(self._folder, step, ".pt")
        return file, file.with_suffix(".json")

    def lost(self, is_complete: bool) -> str | None:
        """Return the newest loss of a run without any usable checkpoint, or None without a loss.

        A run that has never completed a checkpoint begins again, and has lost nothing. A run that
        is complete has nothing to resume: if all its checkpoints were deleted, its best weights are
        the result.
        """
        files = steps_of(self._names, ".pt")
        steps = {*self.steps, *files, *steps_of(self._names, ".json.tmp")}
        problems = []
        for step in sorted(steps, reverse=True):
            if (problem := self.problem(step)) is None:
                return None
            # A start removes a sidecar under a temporary name whose checkpoint is not whole.
            if step in self.steps or step in files:
                problems.append(problem)
        if problems:
            return problems[0]
        needs_them = not (is_complete and (self._run / WEIGHTS).is_file())
        is_lost = any(name.startswith("step-") and ".damaged" in name for name in self._names) or (
            needs_them and os.path.lexists(self._run / FIRST_CHECKPOINT)
        )
        return f"{CHECKPOINTS} has no checkpoint" if is_lost else None

    def problem(self, step: int) -> str | None:
        """Return which file of the checkpoint of `step` is missing or damaged, or None."""
        file, path = self.paths(step)
        sidecars = [fields for end in _ENDS if (fields := self.sidecar(step, end)) is not None]
        if not sidecars:
            return f"{path.name} is {'damaged' if path.name in self._names else 'missing'}"
        of_run = [each for each in sidecars if each.get("run_id") == self._run_id]
        of_run = [each for each in of_run if each.get("step") == step]
        if not of_run:
            return f"{path.name} is of another run or step"
        try:
            size = file.stat().st_size
        except OSError:
            return f"{file.name} is missing"
        if all(each.get("bytes") != size for each in of_run):
            return f"{file.name} has another size"
        if not _is_recorded(self._run / DIGESTS, step):
            lacks = os.path.lexists(self._run / DIGESTS)
            return f"{DIGESTS} {f'lacks step {step}' if lacks else 'is missing'}"
        return None


def _is_recorded(path: Path, step: int) -> bool:
    """Return whether digests.jsonl has an entry of the checkpoint of `step` in its last 16 MiB.

    An entry before these bytes is not looked for.
    """
    for last_bytes in (2**14, 2**18, 2**24):  # most files need only the first
        try:
            with open_from(path, 0, last_bytes) as file:
                is_whole, lines = file.tell() == 0, file.read().split(b"\n")[:-1]
        except OSError:
            return False
        for line in reversed(lines):
            if b'"saved"' in line and (entry := parsed(line)) and step_of(entry) == step:
                return True
        if is_whole:
            return False
    return True
