"""Decide what of the stored runs can go."""

from dataclasses import dataclass
from pathlib import Path

from entrypoint.runs.read import StoredRun
from entrypoint.runs.resumable import ListedCheckpoints
from trainbox.files.regular_files import object_if_valid
from trainbox.files.sidecar import damage, names_in, steps_of
from trainbox.folders.lease import LEASE
from trainbox.folders.record_folder import (
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    LOGS,
    MANIFEST,
    METRICS,
    REHEARSAL,
    is_sweep,
)

# What Trainbox itself writes before the first checkpoint.
_OF_A_START = {
    *(CHECKPOINTS, REHEARSAL, LEASE, LOGS, CONFIG, MANIFEST, METRICS),
    *("digests.jsonl", "config.json.tmp", "manifest.json.tmp"),
}

_KEPT = 2  # checkpoints from which a training can resume


@dataclass(frozen=True)
class Leftover:
    """Files that no command needs any more.

    Attributes:
        run: The name of their run.
        what: What they are.
        paths: The files, or the run's whole folder.
    """

    run: str
    what: str
    paths: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        files = [
            file
            for path in self.paths
            for file in (path.rglob("*") if path.is_dir() else (path,))
            if file.is_file() and not file.is_symlink()
        ]
        return sum(file.stat().st_size for file in files)


def leftovers(run: StoredRun, folder: Path) -> list[Leftover]:
    """Return what of a run in `folder` can go: never the model, nor the last way to resume.

    Nothing of a running training can go, nor of a script or a sweep. Of a training that has not
    finished, only what its killed rehearsal has left can go.
    """
    if run.state in ("running", "unreadable") or run.is_script or is_sweep(folder):
        return []
    names = {path.name for path in folder.iterdir() if not path.name.startswith(EVENTS)}
    has_files = any(steps_of(names_in(folder / CHECKPOINTS), ".pt"))
    is_empty = not (run.step or has_files) and names <= _OF_A_START
    if run.state in ("failed", "not trained") and is_empty:
        return [Leftover(run.name, "a start that has trained nothing", (folder,))]
    found = []
    if (folder / REHEARSAL).is_dir():
        found.append(Leftover(run.name, "a rehearsal that was killed", (folder / REHEARSAL,)))
    if run.state == "complete" and (unneeded := _unneeded(folder)):
        number = len(unneeded) // 2
        what = f"{number} older checkpoints" if number > 1 else "an older checkpoint"
        found.append(Leftover(run.name, what, unneeded))
    return found


def _unneeded(folder: Path) -> tuple[Path, ...]:
    """Return the files of the checkpoints that neither are the best nor resume the run.

    The run resumes from its newest usable checkpoint, or from the usable one before it if that one
    has other bits than the records of the run.
    """
    run_id = (object_if_valid(folder / MANIFEST) or {}).get("run_id")
    checkpoints = ListedCheckpoints(folder, run_id)
    if len(checkpoints.steps) <= _KEPT:
        return ()
    usable = (step for step in reversed(checkpoints.steps) if _is_usable(checkpoints, step))
    newest, second = next(usable, None), next(usable, None)
    if newest is None or second is None:
        return ()
    best = (checkpoints.sidecar(newest) or {}).get("best_step")
    older = [step for step in checkpoints.steps if step < second and step != best]
    return tuple(path for step in older for path in checkpoints.paths(step))


def _is_usable(checkpoints: ListedCheckpoints, step: int) -> bool:
    file, _ = checkpoints.paths(step)
    sidecar = checkpoints.sidecar(step)
    return checkpoints.problem(step) is None and sidecar is not None and not damage(file, sidecar)
