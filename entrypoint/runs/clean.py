"""Decide what of the stored runs can go."""

from dataclasses import dataclass
from pathlib import Path

from entrypoint.runs.read import CHECKPOINTS, StoredRun
from trainbox.files.regular_files import object_if_valid

REHEARSAL = "rehearsal"  # a folder in a run's folder, which a killed start leaves


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

    Nothing of a running training can go, and of a training that has not finished only what its
    killed rehearsal has left.
    """
    if run.state == "running":
        return []
    checkpoints = sorted((folder / CHECKPOINTS).glob("step-*.pt"))
    has_result = checkpoints or (folder / "model.safetensors").exists()
    if run.state in ("failed", "not trained") and not (has_result or run.is_script):
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
    """Return all checkpoints with their sidecars but the last and the best one."""
    if not checkpoints:
        return ()
    last = object_if_valid(checkpoints[-1].with_suffix(".json"))
    if last is None:  # damaged, so an older one may be the last way to resume
        return ()
    best = f"step-{last.get('best_step') or 0:08d}"
    kept = {checkpoints[-1].stem, best}
    return tuple(
        file
        for path in checkpoints
        if path.stem not in kept
        for file in (path, path.with_suffix(".json"))
    )
