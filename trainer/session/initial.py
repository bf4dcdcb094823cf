"""Start a run from the weights of another run or of a file, as `--init` requests."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainbox.classification import Classification
from trainbox.disclosure.suggested_commands import near_runs, such_as
from trainbox.errors import WrongUse
from trainbox.files.regular_files import object_if_valid
from trainbox.files.sidecar import damage, sidecar_if_valid
from trainbox.folders.record_folder import CONFIG
from trainbox.initial_weights import (
    last_layer,
    load,
    match,
    read_weights,
    tensors_of,
    trained_part,
)
from trainer.loop.state import Job
from trainer.records.run_record import RunRecord
from trainer.session.same_on_all_ranks import refuse_difference


def start_from_weights(job: Job, init: str) -> None:
    """Load the weights of `init`, the folder of a run or a file, into the model of a new run.

    Each rank reads the file. `job.initial` is set to the file, its SHA-256 and what was loaded.

    Raises:
        WrongUse: The file cannot be used, does not fit the model, differs between machines, or
            changes during the call.
    """
    file = _weights_file(init, f"--init {init}")
    digest = _sha256(file)
    refuse_difference(
        job.world, {f"the SHA-256 of --init {file}": digest}, "copy the same file to all machines"
    )
    model = trained_part(job.state.model)
    tensors, removed = read_weights(file, model)
    if _sha256(file) != digest:
        raise WrongUse(
            f"--init {file} changed while it was read, as the best weights of a run that trains: "
            "let that run end, or give a copy of the file"
        )
    found = match(model, tensors, f"--init {file}", "use weights of this model, or drop --init")
    # Under FSDP, each rank keeps its share of each tensor.
    here = tensors_of(model)
    load(model, {n: job.strategy.share(tensors[n], here[n]) for n in found.loaded}, found)
    last = last_layer(model)
    count = here[f"{last}.weight"].shape[0] if f"{last}.weight" in here else 0
    outputs = "classes" if isinstance(job.task, Classification) else "outputs"
    job.initial = {
        "file": str(file),
        "sha256": digest,
        "loaded": found.line(last, f"{count} {outputs}", removed),
    }


def refuse_other_weights(path: Path, manifest: Mapping[str, Any]) -> None:
    """Check that the weights from which the run in `path` was started are unchanged.

    Raises:
        WrongUse: The file does not exist any more, or has another SHA-256.
    """
    initial = manifest.get("init")
    if not (isinstance(initial, dict) and isinstance(initial.get("file"), str)):
        return
    file = _weights_file(initial["file"], f"{path} was started from {initial['file']}, which")
    if (now := _sha256(file)) != initial.get("sha256"):
        raise WrongUse(
            f"{path} was started from {file}, which has changed since (its SHA-256 was "
            f"{str(initial.get('sha256'))[:12]}... and is {now[:12]}...): restore the file"
        )


def _weights_file(init: str, source: str) -> Path:
    """Return the file of `init`: of a run, its best weights. `source` starts messages.

    Raises:
        WrongUse: It does not exist, or is a checkpoint whose sidecar has another SHA-256.
    """
    path = Path(init)
    if not path.exists():
        raise WrongUse(f"{source} does not exist: {near_runs(path, 'check the path')}")
    if path.is_file():
        beside = path.with_suffix(".json")
        is_ours = path.suffix == ".pt" and "sha256" in (object_if_valid(beside) or {})
        sidecar = sidecar_if_valid(beside) if is_ours else None
        problem = damage(path, sidecar) if sidecar else "its sidecar was edited or damaged"
        if is_ours and problem:
            raise WrongUse(f"{source} is damaged ({problem}): restore it, or give another file")
        return path
    if not (path / CONFIG).is_file():
        raise WrongUse(
            f"{source} is neither a file nor a run: give a file of weights, or the folder of a run"
            f"{such_as(path)}"
        )
    run = RunRecord.open(path)
    files = run.files
    if not files.best.is_file():
        newest = [sidecar_if_valid(files.path(step)) or {} for step in files.steps()[-1:]]
        cure = ", which a run has after its first validation: let the run validate"
        if any(sidecar.get("best_step") is not None for sidecar in newest):
            cure = " any more: give the command of that run again, which writes the file"
        raise WrongUse(
            f"{source} has no {files.best.name}{cure}, or give a file of its folder checkpoints"
        )
    return run.best_weights()


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise WrongUse(f"{file} cannot be read ({error.strerror}): check the file") from error
