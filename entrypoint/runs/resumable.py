"""Whether the same command can resume a training, from the names and the sizes of its files.

A start of the training also compares contents: see trainer/records/checkpoint_files.py.
"""

import os
from pathlib import Path

from trainbox.files.entries import parsed, step_of
from trainbox.files.regular_files import open_from
from trainbox.files.sidecar import FIRST_CHECKPOINT, checkpoint_path, sidecar_if_valid, steps_in
from trainbox.folders.record_folder import CHECKPOINTS, DIGESTS, WEIGHTS

_ENDS = (".json", ".json.tmp")  # A start finishes a save that lacks only the rename of its sidecar.


def lost_checkpoints(folder: Path, run_id: object, is_complete: bool) -> str | None:
    """Return the newest loss of a run without any usable checkpoint, or None without a loss.

    A run that has never completed a checkpoint begins again, and has lost nothing. A run that is
    complete has nothing to resume: if all its checkpoints were deleted, its best weights are the
    result.
    """
    checkpoints = folder / CHECKPOINTS
    listed = set(steps_in(checkpoints))
    steps = listed.union(*(steps_in(checkpoints, end) for end in (".pt", ".json.tmp")))
    problems = []
    for step in sorted(steps, reverse=True):
        if (problem := _problem(folder, step, run_id)) is None:
            return None
        # A start removes a sidecar under a temporary name whose checkpoint is not whole.
        if step in listed or os.path.lexists(checkpoint_path(checkpoints, step, ".pt")):
            problems.append(problem)
    if problems:
        return problems[0]
    needs_them = not (is_complete and (folder / WEIGHTS).is_file())
    is_lost = any(checkpoints.glob("step-*.damaged*")) or (
        needs_them and os.path.lexists(folder / FIRST_CHECKPOINT)
    )
    return f"{CHECKPOINTS} has no checkpoint" if is_lost else None


def _problem(folder: Path, step: int, run_id: object) -> str | None:
    """Return which file of the checkpoint of `step` is missing or damaged, or None."""
    paths = [checkpoint_path(folder / CHECKPOINTS, step, end) for end in _ENDS]
    sidecars = [fields for path in paths if (fields := sidecar_if_valid(path)) is not None]
    name = paths[0].name
    if not sidecars:
        return f"{name} is {'damaged' if os.path.lexists(paths[0]) else 'missing'}"
    of_run = [each for each in sidecars if (each.get("run_id"), each.get("step")) == (run_id, step)]
    if not of_run:
        return f"{name} is of another run or step"
    file = checkpoint_path(folder / CHECKPOINTS, step, ".pt")
    try:
        size = file.stat().st_size
    except OSError:
        return f"{file.name} is missing"
    if all(each.get("bytes") != size for each in of_run):
        return f"{file.name} has another size"
    if not _is_recorded(folder / DIGESTS, step):
        lacks = os.path.lexists(folder / DIGESTS)
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
