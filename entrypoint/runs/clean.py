"""Decide what of the stored runs can go."""

from dataclasses import dataclass
from pathlib import Path

from entrypoint.runs.read import StoredRun
from trainbox.files.sidecar import damage, sidecar_if_valid
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
    checkpoints = sorted((folder / CHECKPOINTS).glob("step-*.pt"))
    names = {path.name for path in folder.iterdir() if not path.name.startswith(EVENTS)}
    is_empty = not (run.step or checkpoints) and names <= _OF_A_START
    if run.state in ("failed", "not trained") and is_empty:
        return [Leftover(run.name, "a start that has trained nothing", (folder,))]
    found = []
    if (folder / REHEARSAL).is_dir():
        found.append(Leftover(run.name, "a rehearsal that was killed", (folder / REHEARSAL,)))
    if run.state == "complete" and (unneeded := _unneeded(checkpoints)):
        number = len(unneeded) // 2
        what = f"{number} older checkpoints" if number > 1 else "an older checkpoint"
        found.append(Leftover(run.name, what, unneeded))
    return found


def _unneeded(checkpoints: list[Path]) -> tuple[Path, ...]:
    """Return the checkpoints and sidecars that neither are the best nor resume the run.

    The run resumes from its newest intact checkpoint, or from the one before it if that one has
    other bits than the records of the run.
    """
    for place, path in reversed(list(enumerate(checkpoints))):
        sidecar = sidecar_if_valid(path.with_suffix(".json"))
        if sidecar is not None and not damage(path, sidecar):
            best = f"step-{sidecar.get('best_step') or 0:08d}"
            older = [each for each in checkpoints[: max(0, place - 1)] if each.stem != best]
            return tuple(file for each in older for file in (each, each.with_suffix(".json")))
    return ()
