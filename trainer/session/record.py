"""Record what a run is trained with, and compare it when the run resumes."""

import contextlib
import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from trainbox.classification import Classification
from trainbox.disclosure.recorded_values import edited_settings, listed_changes
from trainbox.errors import Changed, ExitCode, Failure, StorageFailure, WrongUse, text_of
from trainbox.folders.record_folder import CONFIG, MANIFEST, WEIGHTS
from trainbox.options.config import FREE_AT_RESUME, Config
from trainer.checks.hidden_state import DRILL, named
from trainer.loop.state import Inference, Job
from trainer.loop.task_checks import collate_of
from trainer.parallel.strategy import Strategy
from trainer.records import manifest
from trainer.records.compare_runs import cannot_resume, changes_bits, manifest_differences
from trainer.records.run_log import RunLog
from trainer.records.run_record import manifest_of_another_run, read_manifest
from trainer.session.same_on_all_ranks import refuse_difference, refuse_other_classes
from trainer.system.sources import loaded_sources, located_sources

_CHANGED = "changed_later"  # the hidden state that has changed, with the step, in the manifest


def refuse_edited(settled: Config, strategy: Strategy, run: RunLog, anyway: bool) -> None:
    """Compare the settings with the settings at the run's start.

    A user may have edited config.json or the manifest since.

    Raises:
        WrongUse: A setting that changes the result differs.
    """
    world = strategy.world
    manifest = world.from_first(read_manifest(run.folder)) or {}
    changed = edited_settings(manifest, dataclasses.asdict(settled))
    if not strategy.rules.keeps_shards or changed.get("settings.shards", (0,))[0] is None:
        # The number of shards is the number of processes, which is compared as part of the plan.
        changed.pop("settings.shards", None)
    if settled.memory_format is None:
        # Without config.json, the memory format is chosen again.
        changed.pop("settings.memory_format", None)
    if anyway or not world.from_first(run.folder.has_had_a_checkpoint()):
        changed.pop("settings.accumulation", None)  # each start chooses what fits in memory
    if changed:
        if other := world.from_first(manifest_of_another_run(run.path, manifest)):
            raise WrongUse(f"{other}: restore it, or start a new run with another --run name")
        raise WrongUse(
            f"the settings of {run.path} were changed after its start ({listed_changes(changed)}): "
            "undo the change in config.json (manifest.json has the old values), or start a "
            "new run with another --run name"
        )


@dataclass(frozen=True)
class DataRecord:
    """Digests of the datasets, and of the source files that are loaded after they were read."""

    digests: dict[str, str]
    sources: dict[str, str]


def look_at_data(job: Inference, datasets: Mapping[str, Dataset[Any]]) -> DataRecord:
    """Read some examples of the `datasets` by name, and compare them between ranks.

    Raises:
        WrongUse: The data differ between ranks.
    """
    collate, digests, sources = collate_of(job.task), dict[str, str](), dict[str, str]()
    for name, dataset in datasets.items():
        digests[name], of_reader = manifest.dataset_digest(dataset, job.workers, collate)
        sources |= of_reader
    refuse_difference(
        job.world,
        {f"the digest of the {name} data": digest for name, digest in digests.items()},
        "make the data depend only on files and on the generators of torch, NumPy and Python, "
        "which are seeded before train_dataset",
    )
    return DataRecord(digests, sources | loaded_sources())


def record_start(
    job: Job, data: DataRecord, anyway: bool, did_not_fit: Sequence[str], complete: bool
) -> None:
    """Write the manifest and config.json, or compare them with the files of the run's start.

    `did_not_fit` has a message for each earlier attempt, whose micro-batches did not fit in memory.
    A `complete` run is compared, and its manifest does not change.

    Raises:
        Changed: Something that changes bits differs, and `anyway` is false.
    """
    sources = data.sources
    if job.run.writes:
        sources = _write_manifest(job, data, anyway, did_not_fit, complete)
    job.sources = manifest.SourceRecord(job.run, job.world.from_first(sources), anyway)
    job.run.folder.write_text("config.json", _stored(job).to_json())


@contextlib.contextmanager
def end_recorded(run: RunLog) -> Iterator[None]:
    """Add to the manifest how this start ends: the exit code, and the message of a failure.

    A start that is refused, or whose run was complete before, has not begun and has no end.
    """

    def record(code: int, message: str = "") -> None:
        stored = read_manifest(run.folder) if run.writes else None
        if stored is not None and stored.get("end", True) is None:
            end = {"code": int(code), "message": message}
            with contextlib.suppress(StorageFailure):  # the training's own end matters more
                run.folder.write_json("manifest.json", stored | {"end": end})

    records = (CONFIG, MANIFEST) if run.writes else ()
    # A complete run whose manifest was lost before is shown with --resume anyway.
    needed = [name for name in records if (run.path / name).exists()] or records
    try:
        yield
    except BaseException as error:
        code = error.exit_code if isinstance(error, Failure) else ExitCode.UNEXPECTED
        record(code, text_of(error))
        raise
    for name in needed:
        if not (path := run.path / name).exists():
            raise StorageFailure(
                f"{path} was removed while the run was trained, so no command can use the run: "
                f"restore it; {WEIGHTS} has the best weights"
            )
    record(ExitCode.SUCCESS)


def changing_state(job: Job) -> list[str] | None:
    """Return the names of the hidden state that may change, or None without a rehearsal."""
    changing = _recorded_rehearsal(job).get("changing")
    return changing if isinstance(changing, list) else None


def eager_by_rehearsal(job: Job, anyway: bool) -> str:
    """Return why the rehearsal of this run does not allow captured steps, or "".

    A run that resumes `anyway` may compute other steps than its rehearsal.
    """
    if anyway and job.state.progress.step:
        return "--resume anyway"
    rehearsal = _recorded_rehearsal(job) if job.state.progress.step else job.rehearsal
    reason = str(rehearsal.get("eager", "the run was not rehearsed"))
    return f"the rehearsal had {reason}" if reason.startswith("--") else reason


def _recorded_rehearsal(job: Job) -> Mapping[str, Any]:
    """Return the entry of the manifest about the rehearsal of this run, or an empty one."""
    rehearsal = (job.world.from_first(read_manifest(job.run.folder)) or {}).get("rehearsal")
    return rehearsal if isinstance(rehearsal, dict) else {}


def record_change(job: Job, names: Collection[str], step: int) -> None:
    """Add the names of hidden state that has changed by `step` to the manifest."""
    manifest = read_manifest(job.run.folder) if job.run.writes else None
    if manifest is not None:
        changed = manifest.get(_CHANGED, {}) | dict.fromkeys(names, step)
        job.run.folder.write_json("manifest.json", manifest | {_CHANGED: changed})


def _notes(manifest: Mapping[str, Any]) -> list[str]:
    """Return the notes about the task in the manifest of a run that resumes."""
    rehearsal, changed = manifest.get("rehearsal"), manifest.get(_CHANGED)
    notes = rehearsal.get("notes", []) if isinstance(rehearsal, dict) else []
    late = changed if isinstance(changed, dict) else {}
    later = [f"{named(late)} changed during the training, and checkpoints leave this out; {DRILL}"]
    return [*map(str, notes), *(later if late else [])]


def _stored(job: Job) -> Config:
    """Return the settings for config.json, without shards under fsdp.

    Under fsdp, each start has its own number of shards.
    """
    settings = dataclasses.asdict(job.config)
    return job.config if job.strategy.rules.keeps_shards else Config(**{**settings, "shards": None})


def _write_manifest(
    job: Job, data: DataRecord, anyway: bool, did_not_fit: Sequence[str], complete: bool
) -> dict[str, str]:
    """Write the manifest of a new run, or compare it, and return the known source files.

    If a run resumes, its differences are added to the manifest.

    Raises:
        Changed: Something that changes bits differs, and `anyway` is false.
    """
    # Describe this start.
    step, run = job.state.progress.step, job.run
    settings = {
        name: value
        for name, value in dataclasses.asdict(_stored(job)).items()
        if name not in FREE_AT_RESUME | {"threads"}
    }
    found = manifest.describe(job.strategy, sys.argv[1:], settings, data.digests, data.sources)
    if job.initial is not None:
        found["init"] = job.initial
    found["classes"] = list(job.task.class_names) if isinstance(job.task, Classification) else None
    found["steps"] = job.schedule.total_steps
    if step == 0:
        found["rehearsal"] = job.rehearsal
    attempts = {"did_not_fit": list(did_not_fit)} if did_not_fit else {}
    # Write the manifest of a new run.
    stored = read_manifest(run.folder)
    if stored is None and complete:
        run.report(
            f"{run.path}/manifest.json is missing or damaged: it is unknown what this run "
            "was trained with"
        )
        return data.sources
    if stored is None or step == 0:
        content = {"run_id": job.checkpoints.files.run_id} | found | attempts | {"end": None}
        run.folder.write_json("manifest.json", content)
        return data.sources
    job.notes += _notes(stored)
    # Compare with the manifest. The files of modules that the task imports only later are compared
    # now as well, before anything is computed.
    known: dict[str, str] = stored.get("sources", {})
    found["sources"] |= located_sources(known.keys() - data.sources.keys())
    changed = manifest_differences(stored, found)
    if not anyway:
        refuse_other_classes(job.task, run.path, stored.get("classes"))
    breaking = {name: values for name, values in changed.items() if changes_bits(name)}
    if breaking and not anyway:
        if not complete:
            raise cannot_resume(run.path, breaking)
        raise Changed(
            f"{run.path} is complete, but its task, data, software or hardware has changed since "
            f"({listed_changes(breaking)}): undo the change, show the result with --resume anyway, "
            "or start a new run with another --run name"
        )
    if changed:
        run.report(f"changed since the run's start: {listed_changes(changed)}")
    # Add this start to the manifest.
    if not complete:
        start = {"step": step, "argv": found["argv"], "plan": found["plan"], "changed": changed}
        start |= {name: found[name] for name in ("config_file",) if name in found}
        start |= {} if job.config.capture == "off" else {"eager": job.eager}
        resumes = [*stored.get("resumes", []), start | attempts]
        content = stored | {
            "settings": found["settings"],
            "sources": found["sources"] | known,
            "resumes": resumes,
            "end": None,
        }
        run.folder.write_json("manifest.json", content)
    return {**known, **found["sources"]}
