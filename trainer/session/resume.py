"""Resume a run from its newest complete checkpoint."""

import secrets

from trainbox.errors import WrongUse
from trainer.checks.rehearsal import remove_rehearsal
from trainer.loop.state import Job
from trainer.parallel.world import World
from trainer.records.checkpoint import RunCheckpoints
from trainer.records.checkpoint_files import CheckpointFiles
from trainer.records.jsonl import read_entries
from trainer.records.run_log import RunLog
from trainer.records.run_record import read_manifest


def find_checkpoint(
    checkpoints: RunCheckpoints, run: RunLog, world: World, resume: str
) -> int | None:
    """Return the step of the run's newest valid checkpoint, which rank 0 chooses, or None.

    A run without a checkpoint starts from the beginning, and gets its id here.

    Raises:
        WrongUse: There is a checkpoint, and `resume` is `never`.
    """
    # Rank 0 reads whole checkpoints to verify them, which may take long.
    found = None
    with world.wait_for_all("the verification of the checkpoint"):
        if world.is_first:
            found = _newest(checkpoints.files, run, resume == "anyway")
    step: int | None = world.from_first(found)
    if step is not None and resume == "never":
        raise WrongUse(
            f"--resume never was given, but {run.path} has a checkpoint of step {step}: "
            "choose another --run name, or remove the folder"
        )
    return step


def resume_job(job: Job, step: int) -> None:
    """Restore the checkpoint of `step`; all ranks must call this."""
    with job.world.wait_for_all("the load of the checkpoint"):
        job.state.restore(job.checkpoints.files.load(step), job.strategy, job.run.path)
        if job.world.is_first and job.state.progress.best_step is not None:
            job.checkpoints.files.restore_best(job.state.progress.best_step)


def _newest(files: CheckpointFiles, run: RunLog, anyway: bool) -> int | None:
    """Return the step of the newest valid checkpoint of this run, or None.

    Raises:
        WrongUse: There are checkpoints without a manifest, and `anyway` is false.
    """
    # Find the id of the run. Only checkpoints with this id belong to it.
    files.remove_leftovers()
    remove_rehearsal(run)
    described = read_manifest(run.folder)
    if described is not None:
        files.run_id = described["run_id"]
    elif files.steps():
        if not anyway:
            raise WrongUse(
                f"{run.path}/manifest.json is missing or damaged, so Trainbox cannot check "
                "whether a resume has the same bits: restore it, or resume with --resume anyway"
            )
        files.run_id = files.run_id_found()
    # Find its newest checkpoint. Without a checkpoint, the run starts.
    step = files.newest(recorded=not anyway)
    if step is None:
        # The generators of a task are seeded, so an id from them would not be unique.
        files.run_id = secrets.token_hex(8)
        if trained := max(
            (entry["step"] for entry in read_entries(run.path / "metrics.jsonl")), default=0
        ):
            run.report(
                f"{run.path} was stopped after step {trained}, before its first "
                "checkpoint: it restarts at step 0"
            )
    elif problem := files.unrecorded(step):
        run.report(f"the checkpoint of step {step} was not compared: {problem}")
    return step


def reason_to_keep_micro_batches(
    checkpoints: RunCheckpoints, world: World, accumulation: int | None, resume: str
) -> str | None:
    """Return why the batch must not be split further, or None if it may be.

    `accumulation` is the requested number of micro-batches, or None.
    """
    files = checkpoints.files
    if resume != "anyway" and (steps := world.from_first(files.steps())):
        return (
            f"{files.folder.parent} has a checkpoint of step {steps[-1]}, and smaller "
            "micro-batches change the bits: resume with more memory, or use --resume anyway"
        )
    if accumulation is not None:
        return (
            f"--accumulation {accumulation} (or the config.json that was given) sets the number "
            "of micro-batches: raise it, or drop it, and Trainbox chooses a number that fits"
        )
    return None
