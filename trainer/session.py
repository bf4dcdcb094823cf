"""Run one call of `train` or `verify`, from its folder to its exit code."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.data.nested import tensors_in
from trainer.errors import Changed, Failure, NetworkFailure, OutOfMemory, WrongUse, called_exit
from trainer.loop.build import build, settle
from trainer.loop.fit import fit
from trainer.loop.meter import Meter
from trainer.loop.out_of_memory import (
    DoesNotFit,
    all_fit,
    examples_at_once,
    free_memory,
    memory_used_up,
    with_smaller_micro_batches,
)
from trainer.loop.preflight import preflight_check
from trainer.loop.preflight_labels import check_labels
from trainer.loop.report import closing, header, samples_per_second, smaller_micro_batches
from trainer.loop.shared_memory import check_shared_memory, shared_memory_full
from trainer.loop.state import Job
from trainer.parallel.strategy import (
    Strategy,
    bits_depend_on_processes,
    join,
    launched_as,
)
from trainer.parallel.world import World, is_network_error
from trainer.records import manifest
from trainer.records.compare import (
    cannot_resume,
    changes_bits,
    edited_settings,
    listed_changes,
    manifest_differences,
    read_entries,
)
from trainer.records.evidence import Evidence, verdict
from trainer.records.run_log import RunLog
from trainer.records.shipped import check_files
from trainer.settings.config import FREE_AT_RESUME, Config, check, parse_config, split_metric
from trainer.system.files import read_object
from trainer.system.hints import command
from trainer.system.signals import StopRequest
from trainer.system.sources import loaded_sources, located_sources
from trainer.system.storage import storage_failure
from trainer.system.temporary import sockets_in_a_folder, temporary_folder
from trainer.task import load_task
from trainer.task_errors import mistake_of


# The outermost context: all loader workers must have ended when their folder is removed.
@sockets_in_a_folder()
def train_task(
    config: Config,
    stop: StopRequest,
    device_name: str,
    runs_dir: Path,
    run_name: str | None,
    data_dir: Path,
    resume: str,
    until_step: int | None = None,
    validated: Callable[[int, Mapping[str, float]], None] | None = None,
    measure_s: float | None = None,
    swept: Sequence[str] = (),
) -> dict[str, float]:
    """Train `config.task` in `runs_dir/run_name`, and return the best metrics and the speed.

    If a run with the same settings was stopped, the training resumes from its newest checkpoint.
    With `until_step`, the training ends there as if complete, with the learning rates of the whole
    training. `validated` is called with the step and the metrics of each validation. With
    `measure_s`, the training ends after about that many measured seconds. TensorBoard shows the
    settings `swept` first. The metric that selects the best checkpoint is first in the result. The
    speed is its last entry, `samples_per_second`.

    Raises:
        Failure: The training did not succeed. The class of the failure has the exit code.
    """
    with _told_as_failures(runs_dir):
        strategy = join(device_name)
        world = strategy.world
        # Check that all machines have the same software and arguments. The versions are first,
        # because another version may have other settings.
        _refuse_unlike(
            world, {"torch": torch.__version__, "trainbox": manifest.revision()}, _SAME_WORDS
        )
        _refuse_unlike(world, {"device": world.device.type}, _SAME_HARDWARE)
        _refuse_unlike(
            world, {"run": run_name, "resume": resume, **dataclasses.asdict(config)}, _SAME_WORDS
        )
        # Load the task, and open the run's folder.
        task = load_task(config.task, config.fields)
        run = RunLog(runs_dir / (run_name or _default_name(config, strategy, runs_dir)), world.rank)
        # This path is the same on all ranks, so that an error of several ranks is printed once.
        log = run.path / "logs" / f"rank-{0 if world.world_size == 1 else '*'}.log"
        with contextlib.closing(run), _told_as_failures(runs_dir, type(task).__name__, log):
            # Choose all settings, and compare them with those of the run's start.
            settled = settle(config, task, strategy, run)
            _refuse_unlike(world, dataclasses.asdict(settled), _SAME_HARDWARE)
            _refuse_edited(settled, strategy, run, resume == "anyway")
            check(settled, world.device.type)
            # Train. If the first steps do not fit in memory, restart with smaller micro-batches.
            did_not_fit: list[str] = []
            while True:
                job = build(settled, task, strategy, run, data_dir)
                job.until_step = until_step
                meter = Meter(job, measure_s) if measure_s else None
                _resume(job, resume)
                try:
                    _start(job, stop, resume, did_not_fit, validated, swept)
                    if meter is not None:
                        meter.write()
                    break
                except DoesNotFit as error:
                    found = str(error)
                finally:
                    job.checkpoints.finish()
                smaller = with_smaller_micro_batches(
                    settled, job.state.model, found, _why_parts_stay(job, config, resume)
                )
                did_not_fit.append(f"{found} with {examples_at_once(settled)} examples at once")
                settled = smaller
                run.end_progress()
                del job, meter
                free_memory()
        # Return the metrics, starting with the one that selects the best checkpoint.
        world.leave()
        _, chosen = split_metric(settled.best_by, "--best-by")
        metrics = dict(
            sorted(job.state.progress.best_metrics.items(), key=lambda item: item[0] != chosen)
        )
        return {**metrics, "samples_per_second": samples_per_second(job)}


_SAME_WORDS = "start the same version with the same words and TRAINBOX_ variables on each"
_SAME_HARDWARE = (
    f"start it where GPUs, drivers and the task's files are alike (`{command('doctor')}`), or "
    "say what to take on each"
)


def _refuse_unlike(world: World, found: Mapping[str, Any], cure: str) -> None:
    """Raise WrongUse if a value of `found` differs between ranks."""
    digests = [hashlib.sha256(repr(value).encode()).hexdigest()[:16] for value in found.values()]
    if (place := world.first_difference(digests)) is not None:
        name, value = list(found.items())[place]
        raise WrongUse(
            f"{name} is {value} on {socket.gethostname()}, and not on all machines: {cure}"
        )


def _manifest_of(run: RunLog) -> dict[str, Any] | None:
    """Return the run's manifest, or None if it is missing or damaged."""
    found, kinds = (
        run.folder.read_json("manifest.json") or {},
        {"settings": dict, "sources": dict, "plan": dict, "resumes": list},
    )
    return (
        found
        if found and all(isinstance(found.get(name, kind()), kind) for name, kind in kinds.items())
        else None
    )


def _refuse_edited(settled: Config, strategy: Strategy, run: RunLog, anyway: bool) -> None:
    """Compare the settings with those of the run's start.

    A user may have edited config.json or the manifest since.

    Raises:
        WrongUse: A setting that changes the result differs.
    """
    world = strategy.world
    manifest = world.from_first(_manifest_of(run)) or {}
    changed = edited_settings(manifest, dataclasses.asdict(settled))
    if not strategy.keeps_shards or changed.get("settings.shards", (0,))[0] is None:
        # The number of shards is the number of processes, which is compared as part of the plan.
        changed.pop("settings.shards", None)
    if anyway or not world.from_first(run.folder.has_had_a_checkpoint()):
        changed.pop("settings.accumulation", None)  # each start chooses what fits in memory
    if changed:
        raise WrongUse(
            f"the settings of {run.path} are not those that it was started with "
            f"({listed_changes(changed)}): undo the change in "
            "config.json (manifest.json has the old values), or train anew under another --run name"
        )


def verify_run(
    path: Path, steps: int | None, stop: StopRequest, device_name: str, data_dir: Path
) -> None:
    """Repeat the run in `path`, or its first `steps`, and compare the digests.

    The repeated run is in a temporary folder.

    Raises:
        Differs: A digest differs. The message has the first difference, and the manifest entries
            that differ.
        Failure: The run cannot be repeated.
    """
    # Read the digests of the run, and check that there is something to compare with.
    stored = Evidence.of(path)
    if not any(0 < entry["step"] <= (steps or entry["step"]) for entry in stored.digests):
        first = next((entry["step"] for entry in stored.digests if entry["step"]), None)
        raise WrongUse(
            f"{path} has no digest of a trained "
            f"step{f' up to step {steps}' if steps else ''} to compare with (the first is of "
            f"step {first}; --digest-steps N writes more)"
        )
    stored = check_files(stored)
    until = steps if steps is not None and steps <= stored.end else None
    if until is None:
        stored.refuse_unfinished()
    _refuse_another_plan(path, stored.manifest, steps)
    # Train again. Rank 0 writes the manifest, and it alone compares.
    with temporary_folder("verify-") as folder:
        again = folder / "again"
        config = parse_config(json.dumps(stored.config), path / "config.json")
        train_task(config, stop, device_name, folder, again.name, data_dir, "never", steps)
        if (again / "manifest.json").exists():
            repeated = check_files(Evidence.of(again, "the same settings done again"))
            changed = manifest_differences(stored.manifest, repeated.manifest)
            print(verdict(stored, repeated, listed_changes(changed), until), flush=True)


def _refuse_another_plan(path: Path, manifest: Mapping[str, Any], steps: int | None) -> None:
    """Raise WrongUse if the run's bits depend on the world size, and this world size differs."""
    resumes = [
        resume["plan"]
        for resume in manifest.get("resumes", [])
        if resume["step"] < (steps or resume["step"] + 1)
    ]
    starts = list(
        dict.fromkeys(
            (plan["strategy"], plan["world_size"]) for plan in [manifest["plan"], *resumes]
        )
    )
    now = launched_as()
    if not any(bits_depend_on_processes(name) for name, _ in [*starts, now]):
        return
    if len(starts) > 1:
        raise WrongUse(
            f"{path} was trained in parts, by "
            f"{', then '.join(f'{s} on {n}' for s, n in starts)} process(es), and no "
            "single training has its bits: verify its first part with --steps"
        )
    if starts != [now]:
        ((strategy, count),) = starts
        raise WrongUse(
            f"{path} was trained by {strategy} on {count} process(es), and {now[0]} on "
            f"{now[1]} adds in another order: "
            f"verify it with --strategy {strategy} on as many"
        )


def _default_name(config: Config, strategy: Strategy, runs_dir: Path) -> str:
    """Return the task and a digest of the settings, and a suffix if the same bits cannot follow."""
    name = f"{config.task.rpartition(':')[2].lower()}-{config.fingerprint()}"
    if not strategy.keeps_shards:
        return f"{name}-{strategy.name}"
    world = strategy.world
    shards = world.from_first(_shards_of(runs_dir / name))
    return (
        name
        if config.shards is not None or shards is None or shards >= world.world_size
        else f"{name}-x{world.world_size}"
    )


def _shards_of(path: Path) -> int | None:
    """Return the number of shards of the run in `path`, or None if it is not recorded."""
    try:
        shards = read_object(path / "config.json").get("shards")
    except (OSError, ValueError):
        return None
    return shards if isinstance(shards, int) else None


def _resume(job: Job, resume: str) -> None:
    """Restore the newest complete checkpoint, if there is one. Rank 0 chooses it for all ranks.

    Raises:
        WrongUse: There is a checkpoint, and `resume` is `never`.
    """
    step = job.world.from_first(_newest(job, resume == "anyway") if job.world.is_first else None)
    if step is None:
        return
    if resume == "never":
        raise WrongUse(
            f"--resume never, and {job.run.path} holds a checkpoint of step {step}: "
            "choose another --run name, or remove the folder"
        )
    job.state.restore(job.checkpoints.files.load(step), job.strategy, job.run.path)
    if job.world.is_first and job.state.progress.best_step is not None:
        job.checkpoints.files.restore_best(job.state.progress.best_step)


def _newest(job: Job, anyway: bool) -> int | None:
    """Return the step of the newest complete checkpoint of this run, or None.

    A run that starts gets its id here.

    Raises:
        WrongUse: There are checkpoints without a manifest, and `anyway` is false.
    """
    run, checkpoints = job.run, job.checkpoints
    checkpoints.files.remove_leftovers()
    described = _manifest_of(run)
    if described is not None:
        run_id = described.get("run_id")
        checkpoints.files.run_id = run_id if isinstance(run_id, str) else None
    elif checkpoints.files.steps():
        if not anyway:
            raise WrongUse(
                f"{run.path}/manifest.json is missing or damaged, so it is unknown whether "
                "the same bits can follow: "
                "restore it, or resume with --resume anyway"
            )
        checkpoints.files.run_id = checkpoints.files.run_id_found()
    step = checkpoints.files.newest()
    if step is None:
        # The generators of a task are seeded, so an id from them would not be unique.
        checkpoints.files.run_id = secrets.token_hex(8)
        if trained := max(
            (entry["step"] for entry in read_entries(run.path / "metrics.jsonl")), default=0
        ):
            run.report(
                f"{run.path} was stopped after step {trained}, before its first "
                "checkpoint: it restarts at step 0"
            )
    return step


def _why_parts_stay(job: Job, asked: Config, resume: str) -> str | None:
    """Return why the batch must not be split further, or None if it may be."""
    if resume != "anyway" and (steps := job.world.from_first(job.checkpoints.files.steps())):
        return (
            f"{job.run.path} holds a checkpoint of step {steps[-1]}, and in smaller parts "
            "other bits follow: go on where there "
            "is more memory, or all the same with --resume anyway"
        )
    if asked.accumulation is not None:
        return (
            f"--accumulation {asked.accumulation} (or the config.json that was given) says "
            "in how many parts: raise it, or "
            "leave it out, and the batch is cut as the memory asks for"
        )
    return None


def _start(
    job: Job,
    stop: StopRequest,
    resume: str,
    did_not_fit: Sequence[str],
    validated: Callable[[int, Mapping[str, float]], None] | None,
    swept: Sequence[str],
) -> None:
    """Check the data and the task, write the manifest, train, and log the results.

    `did_not_fit` has a message for each earlier attempt, whose micro-batches did not fit in memory.

    Raises:
        DoesNotFit: The first steps do not fit in memory.
    """
    # Look at the data, and check that loader workers have enough shared memory.
    run, progress = job.run, job.state.progress
    first_step = progress.step
    complete = (
        progress.step >= job.schedule.total_steps and progress.evaluated_step == progress.step
    ) or progress.ended_early
    data, sources, example_bytes = _look_at_data(job)
    if not complete:
        check_shared_memory(job, *example_bytes)
    # Write the manifest and the settings, and log the header.
    if run.writes:
        sources = _describe(job, data, sources, resume == "anyway", did_not_fit, complete)
    job.sources = manifest.SourceRecord(run, job.world.from_first(sources), resume == "anyway")
    run.folder.write_json("config.json", _stored(job).to_json())
    if did_not_fit:
        smaller_micro_batches(job, did_not_fit[-1])
    else:
        header(job)
    # Check the task, and train.
    if complete:
        run.report(
            "this run is complete: nothing is left to do (a larger --epochs or another "
            "--seed trains a new run)"
        )
    else:
        run.begin(first_step, progress.evaluated_step, job.schedule)
        with all_fit(job.strategy):
            preflight_check(job)
        fit(job, stop, validated)
        run.board.hyperparameters(
            job.config, job.state.progress.best_step or 0, job.state.progress.best_metrics, swept
        )
    run.end_progress()
    closing(job)


def _stored(job: Job) -> Config:
    """Return the settings for config.json, without shards under fsdp.

    Under fsdp, each start has its own number of shards.
    """
    settings = dataclasses.asdict(job.config)
    return job.config if job.strategy.keeps_shards else Config(**{**settings, "shards": None})


def _look_at_data(job: Job) -> tuple[dict[str, str], dict[str, str], list[int]]:
    """Return digests of both datasets, digests of source files, and sizes of examples.

    The source files are those that are loaded after both datasets were read. The sizes are the
    bytes of one example of each dataset.

    Raises:
        WrongUse: The data differ between ranks, or a label is not valid.
    """
    digests, example_bytes, sources = {}, [], dict[str, str]()
    for name, dataset in (("train", job.train), ("validation", job.evaluation.dataset)):
        examples, sources_of_reader = manifest.sampled_examples(dataset, job.workers)
        sources |= sources_of_reader
        check_labels(job, {"train": "training"}.get(name, name), dataset, examples)
        digests[name] = manifest.dataset_digest(dataset, examples)
        example_bytes.append(sum(tensor.nbytes for tensor in tensors_in(examples[:1])))
    if (
        place := job.world.first_difference([digest[:16] for digest in digests.values()])
    ) is not None:
        raise WrongUse(
            f"task {type(job.task).__name__}: the processes have not the same "
            f"{list(digests)[place]} data: make it depend on "
            "files and on torch's, NumPy's and Python's generators alone, which are seeded "
            "before train_dataset"
        )
    return digests, sources | loaded_sources(), example_bytes


def _describe(
    job: Job,
    data: dict[str, str],
    sources: dict[str, str],
    anyway: bool,
    did_not_fit: Sequence[str],
    complete: bool,
) -> dict[str, str]:
    """Write the manifest of a new run, or compare it, and return the known source files.

    If a run resumes, its differences are added to the manifest. The manifest of a complete run does
    not change.

    Raises:
        Changed: Something that changes bits differs from the run's start.
    """
    step, run = job.state.progress.step, job.run
    settings = {
        n: v
        for n, v in dataclasses.asdict(_stored(job)).items()
        if n not in FREE_AT_RESUME | {"threads"}
    }
    found = manifest.describe(job.strategy, sys.argv[1:], settings, data, sources)
    tried = {"did_not_fit": list(did_not_fit)} if did_not_fit else {}
    stored = _manifest_of(run)
    if stored is None and complete:
        run.report(
            f"{run.path}/manifest.json is missing or damaged: it is unknown what this run "
            "was trained with"
        )
        return sources
    if stored is None or step == 0:
        run.folder.write_json(
            "manifest.json",
            json.dumps({"run_id": job.checkpoints.files.run_id} | found | tried, indent=2) + "\n",
        )
        return sources
    # Compare with the manifest. A module that is imported later is compared now, before anything is
    # computed.
    known: dict[str, str] = stored.get("sources", {})
    found["sources"] |= located_sources(known.keys() - sources.keys())
    changed = manifest_differences(stored, found)
    if (breaking := {n: v for n, v in changed.items() if changes_bits(n)}) and not anyway:
        if complete:
            raise Changed(
                f"{run.path} is complete, and was trained with {listed_changes(breaking)}: "
                "restore that, see its result all the "
                "same with --resume anyway, or train anew under another --run name"
            )
        raise cannot_resume(run.path, breaking)
    if changed:
        run.report(f"changed since the run's start: {listed_changes(changed)}")
    # Add this start to the manifest.
    if not complete:
        start = {
            "step": step,
            "argv": found["argv"],
            "plan": found["plan"],
            "changed": changed,
        } | tried
        whole = stored | {
            "sources": found["sources"] | known,
            "resumes": [*stored.get("resumes", []), start],
        }
        run.folder.write_json("manifest.json", json.dumps(whole, indent=2) + "\n")
    return {**known, **found["sources"]}


@contextlib.contextmanager
def _told_as_failures(runs_dir: Path, task: str = "", log: Path | None = None) -> Iterator[None]:
    """Raise known errors of torch, the system and the task's code as Failures with an exit code.

    The traceback goes to the log of this rank, whose path is `log`. Without `log`, no error is
    attributed to the task.
    """
    try:
        yield
    except Failure:
        raise
    except SystemExit as end:
        raise called_exit(end) from end
    except Exception as error:
        if log is not None:
            logging.getLogger(__name__).exception("ended by an error")
        failure = _known(error) if isinstance(error, MemoryError | RuntimeError) else None
        if isinstance(error, OSError):
            failure = _of_the_system(error, runs_dir)
        if failure is None and log is not None:
            failure = mistake_of(error, task, log)
        if failure is None:
            raise
        raise failure from error


def _of_the_system(error: OSError, runs_dir: Path) -> Failure | None:
    """Return the failure for a lost process or for the run's storage, else None.

    An error of a file of the user is an example of None.
    """
    if isinstance(error, ConnectionError):
        return NetworkFailure(f"lost contact with another process: {error}")
    if str(error.filename or "").startswith(str(runs_dir)) or error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
    ):
        return storage_failure(runs_dir, error)
    return None


_MISUSES = {
    "stack expects each tensor to be equal size": (
        "the dataset's examples have not the same shapes, as a batch needs them: pad or "
        "crop them in __getitem__"
    ),
    "mixed torch.Tensor and DTensor": (
        "--strategy fsdp has a block's weights at hand in the block's own forward alone, "
        "and the task or the model uses some "
        "elsewhere: call the block (each part of a ModuleList or Sequential is one), or "
        "use --strategy ddp"
    ),
    "Sharding propagation failed": (  # only the optimizer computes with shards of tensors
        "--strategy fsdp: torch cannot compute this optimizer's step on shares of tensors: "
        "use another (AdamW, say), or "
        "--strategy ddp"
    ),
}


def _known(error: MemoryError | RuntimeError) -> Failure | None:
    """Return the failure for an error of torch that has no class of its own, or None."""
    text, first_line = str(error), str(error).partition("\n")[0]
    if found := memory_used_up(error):
        workers = " or --workers" if "host" in found.partition("(")[0] else ""
        return OutOfMemory(
            f"{found}: lower --batch-size{workers}, or raise --accumulation, which keeps "
            "the batch and cuts it into smaller "
            "parts"
        )
    if "shared memory" in text:  # a loader worker could not allocate it, or had a bus error
        return shared_memory_full()
    for sign, words in _MISUSES.items():
        if sign in text:
            return WrongUse(words)
    if "does not have a deterministic implementation" in text:
        return WrongUse(f"{first_line} Add --fast to train without the promise of the same bits")
    if is_network_error(error):
        return NetworkFailure(f"lost contact with another process: {first_line}")
    return None
