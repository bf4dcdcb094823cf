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
        newest: The step of the newest sidecar, or 0.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._folder = run, run / CHECKPOINTS
        self._names = names_in(self._folder)
        self._listed = steps_of(self._names)
        self.newest = self._listed[-1] if self._listed else 0
        self.sidecar = cache(self._sidecar)

    def _sidecar(self, step: int, end: str = ".json") -> dict[str, Any] | None:
        """Return the fields of the sidecar of `step`, or None if it is missing or damaged."""
        path = checkpoint_path(self._folder, step, end)
        return sidecar_if_valid(path) if path.name in self._names else None

    def lost(self, run_id: object, is_complete: bool) -> str | None:
        """Return the newest loss of a run without any usable checkpoint, or None without a loss.

        A run that has never completed a checkpoint begins again, and has lost nothing. A run that
        is complete has nothing to resume: if all its checkpoints were deleted, its best weights are
        the result.
        """
        files = steps_of(self._names, ".pt")
        steps = {*self._listed, *files, *steps_of(self._names, ".json.tmp")}
        problems = []
        for step in sorted(steps, reverse=True):
            if (problem := self._problem(step, run_id)) is None:
                return None
            # A start removes a sidecar under a temporary name whose checkpoint is not whole.
            if step in self._listed or step in files:
                problems.append(problem)
        if problems:
            return problems[0]
        needs_them = not (is_complete and (self._run / WEIGHTS).is_file())
        is_lost = any(name.startswith("step-") and ".damaged" in name for name in self._names) or (
            needs_them and os.path.lexists(self._run / FIRST_CHECKPOINT)
        )
        return f"{CHECKPOINTS} has no checkpoint" if is_lost else None

    def _problem(self, step: int, run_id: object) -> str | None:
        """Return which file of the checkpoint of `step` is missing or damaged, or None."""
        file, name = (checkpoint_path(self._folder, step, end) for end in (".pt", ".json"))
        sidecars = [fields for end in _ENDS if (fields := self.sidecar(step, end)) is not None]
        if not sidecars:
            return f"{name.name} is {'damaged' if name.name in self._names else 'missing'}"
        of_run = [each for each in sidecars if each.get("run_id") == run_id]
        of_run = [each for each in of_run if each.get("step") == step]
        if not of_run:
            return f"{name.name} is of another run or step"
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
