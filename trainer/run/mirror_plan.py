"""Decide what a mirror of a run's checkpoints needs: names, uploads, removals and markers.

In a mirror, each checkpoint has its own folder, laid out like the run's folder. So a file is never
replaced while an older checkpoint needs it. The marker appears last, so a checkpoint with a marker
is complete:

    step-00000800/checkpoints/step-00000800.pt    and .json, its sidecar
    step-00000800/config.json ...                 the records at the time of the copy
    step-00000800/complete.json                   the marker, with the digest of each file
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainbox.contract.files import parse_object
from trainbox.contract.sidecar import checkpoint_path

MARKER = "complete.json"
NEEDED_RECORDS = ("config.json", "manifest.json")
# They make a resumed run whole. Some do not exist at the first checkpoint.
RECORDS = (*NEEDED_RECORDS, "metrics.jsonl", "digests.jsonl", "first_checkpoint.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Marker:
    """What a checkpoint in a mirror consists of.

    Attributes:
        files: {name: {"bytes": size, "sha256": digest in hex}}, all with a name of `file_names`.
    """

    run_id: str | None
    step: int
    best_step: int | None
    files: Mapping[str, Mapping[str, Any]]


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoint_names(step: int) -> tuple[str, str]:
    """Return the names of the checkpoint's tensors and of its sidecar, relative to the run."""
    folder = Path("checkpoints")
    return str(checkpoint_path(folder, step, ".pt")), str(checkpoint_path(folder, step))


def stored_steps(names: Iterable[str]) -> dict[int, bool]:
    """Return whether each step is complete, for the `names` of all files below the mirror."""
    steps: dict[int, bool] = {}
    for name in names:
        folder, _, rest = name.partition("/")
        if match := re.fullmatch(r"step-([0-9]{8,})", folder):
            step = int(match[1])
            steps[step] = steps.get(step, False) or rest == MARKER
    return steps


def uploads(local: Collection[int], best_step: int | None, complete: Collection[int]) -> list[int]:
    """Return the steps to copy, in this order: the best, which the newest needs, and the newest.

    `local` has the steps of the run's own checkpoints, and `complete` those of the mirror. Other
    steps are not copied: a mirror that is slower than the checkpoints would never catch up.
    """
    wanted = [best_step, max(local, default=None)]
    return [
        step
        for step in dict.fromkeys(wanted)
        if step is not None and step in local and step not in complete
    ]


def removals(local: Collection[int], best_step: int | None, stored: Collection[int]) -> list[int]:
    """Return the `stored` steps, complete or not, that the run does not keep any longer.

    Steps after the newest checkpoint stay, because another machine has trained them. The best one
    stays even if the run's folder has lost it.
    """
    newest, kept = max(local, default=-1), {*local, best_step}
    return sorted(step for step in stored if step < newest and step not in kept)


def parse_marker(text: str, step: int) -> Marker:
    """Return the marker in `text`, which a mirror has for `step`.

    Raises:
        ValueError: The text is not a marker of this step.
    """
    found = parse_object(text)
    run_id, best_step, files = (found.get(name) for name in ("run_id", "best_step", "files"))
    if found.get("step") != step:
        raise ValueError(f"its marker is of step {found.get('step')!r}")
    if not isinstance(run_id, str | None) or type(best_step) not in (int, type(None)):
        raise ValueError("its marker has no valid run_id and best_step")
    names = checkpoint_names(step)
    # Other names could be paths outside of the run's folder.
    if (
        not isinstance(files, dict)
        or not {*names, *NEEDED_RECORDS} <= files.keys() <= {*names, *RECORDS}
        or not all(map(_is_description, files.values()))
    ):
        raise ValueError("its marker does not list the files of a checkpoint")
    return Marker(run_id, step, best_step, files)


def _is_description(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and type(value.get("bytes")) is int
        and bool(_SHA256.fullmatch(str(value.get("sha256"))))
    )
