"""Run one call of `verify` that trains a run again."""

from pathlib import Path

from trainbox.errors import Stopped, WrongUse
from trainbox.files.temporary import temporary_folder
from trainbox.options.strategies import bits_depend_on_processes
from trainer.parallel.strategy import launched_as
from trainer.records.compare_records import Evidence, contradictions, verdict
from trainer.records.run_record import RunRecord
from trainer.session.initial import refuse_other_weights
from trainer.session.train import train_task
from trainer.system.signals import StopRequest


def verify_run(
    path: Path, steps: int | None, stop: StopRequest, device_name: str, data_dir: Path
) -> None:
    """Repeat the run in `path`, or its first `steps`, in a temporary folder; compare the digests.

    Raises:
        Failure: A digest differs. The message has the first difference, and the manifest entries
            that differ.
        Failure: The run cannot be repeated.
        Stopped: A stop was requested.
    """
    # Read the digests of the run, and check that there is something to compare with.
    with contradictions():
        record = RunRecord.open(path)
        stored = Evidence.of(record)
    if not any(0 < entry["step"] <= (steps or entry["step"]) for entry in stored.digests):
        first = next((entry["step"] for entry in stored.digests if entry["step"]), None)
        raise WrongUse(
            f"{path} has no digest of a trained step{f' up to step {steps}' if steps else ''} "
            f"(the first is of step {first}): train with --digest-steps N for more digests"
        )
    until = steps if steps is not None and steps <= stored.end else None
    if until is None:
        stored.refuse_unfinished()
    _refuse_another_plan(record, steps)
    refuse_other_weights(path, stored.manifest)
    # Train again. Rank 0 writes the manifest, and only rank 0 compares.
    with temporary_folder("verify-") as folder:
        again = folder / "again"
        try:
            train_task(
                *(record.config, stop, device_name, folder, again.name, data_dir, "never", steps),
                rehearses=False,
                is_kept=False,
            )
        except Stopped as stopped:  # its message names a checkpoint that is removed here
            raise Stopped(
                f"the verification was stopped by {stop.cause}: the same command begins it again"
            ) from stopped
        if (again / "manifest.json").exists():
            repeated = Evidence.of(RunRecord.open(again), "the repeated run")
            print(verdict(stored, repeated, until), flush=True)


def _refuse_another_plan(run: RunRecord, steps: int | None) -> None:
    """Raise WrongUse if this strategy and world size would give the run other bits."""
    # Collect the strategy and the world size of each start up to `steps`.
    plans = [start["plan"] for start in run.starts if steps is None or start["step"] < steps]
    starts = list(dict.fromkeys((plan["strategy"], plan["world_size"]) for plan in plans))
    now = launched_as()
    if not any(bits_depend_on_processes(name) for name, _ in [*starts, now]):
        return
    # Refuse to repeat a run whose starts had another strategy or number of processes than this one.
    if len(starts) > 1:
        raise WrongUse(
            f"{run.path} was trained by {', then '.join(f'{s} on {n}' for s, n in starts)} "
            "process(es), and a single training cannot repeat its bits: verify its first steps "
            "with --steps"
        )
    if starts != [now]:
        ((strategy, count),) = starts
        raise WrongUse(
            f"{run.path} was trained by {strategy} on {count} process(es), but {now[0]} on "
            f"{now[1]} adds in another order: verify it with --strategy {strategy} on {count} "
            "process(es)"
        )
