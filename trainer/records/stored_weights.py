"""Find a checkpoint of a run, also during its training, and change nothing in its folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainbox.contract.errors import StorageFailure, WrongUse
from trainbox.contract.files import read_object
from trainer.records.checkpoint_files import CheckpointFiles

BEST, LAST = "best", "last"


@dataclass(frozen=True)
class StoredWeights:
    """The model's state in the checkpoint of `step` at `path`, whose file has this SHA-256."""

    path: Path
    step: int
    sha256: str


def find_weights(run: Path, run_id: str | None, which: str) -> StoredWeights:
    """Return the newest checkpoint, or that of the best step, after a check of its SHA-256.

    A training that still runs may remove the checkpoint at any time.

    Raises:
        WrongUse: The run does not have a checkpoint, or was never validated.
        StorageFailure: The checkpoint is damaged.
        FileNotFoundError: It was removed during the call.
    """
    files = _files(run, run_id)
    if not (steps := files.steps()):
        raise WrongUse(
            f"{run} has no checkpoint: wait for the first one, or train it with the same command"
        )
    step: int | None = steps[-1]
    if which == BEST:
        step = _best_step(files, steps[-1])
        if step is None:
            raise WrongUse(
                f"{run} was never validated, so no checkpoint is the best: wait for the first "
                f"validation, or use --checkpoint {LAST}"
            )
    assert step is not None
    sidecar = files.path(step)
    if problem := files.problem(step):
        if step not in files.steps():
            raise FileNotFoundError(sidecar)
        other = LAST if which == BEST else BEST
        raise StorageFailure(
            f"checkpoint {files.path(step, '.pt')} is damaged ({problem}): restore it, or use "
            f"--checkpoint {other}"
        )
    return StoredWeights(files.path(step, ".pt"), step, str(read_object(sidecar)["sha256"]))


def load_state(run: Path, run_id: str | None, step: int) -> Mapping[str, Any]:
    """Return the model's state in the checkpoint of `step`: tensors on the CPU.

    Raises:
        FileNotFoundError: The checkpoint was removed.
        StorageFailure: Loading the file could run code.
    """
    files = _files(run, run_id)
    if not files.path(step, ".pt").exists():
        raise FileNotFoundError(files.path(step, ".pt"))
    state: Mapping[str, Any] = files.load(step)["model"]
    return state


def _files(run: Path, run_id: str | None) -> CheckpointFiles:
    return CheckpointFiles(run / "checkpoints", print, run_id, mapped=True)


def _best_step(files: CheckpointFiles, newest: int) -> int | None:
    """Return the best step that the newest sidecar names.

    Raises:
        StorageFailure: The sidecar is damaged.
        FileNotFoundError: It was removed.
    """
    path = files.path(newest)
    try:
        found = read_object(path)["best_step"]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise StorageFailure(
            f"{path} is damaged ({error}): restore it, or remove it and its .pt file"
        ) from error
    if found is not None and type(found) is not int:
        raise StorageFailure(f"{path} is damaged (best_step is {found!r}): restore it")
    return found
