"""Load the task and the weights of a stored run, and find what has changed since its start."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainbox.contract.config import Settings, check
from trainbox.contract.errors import StorageFailure, WrongUse
from trainbox.task import Task
from trainer.load_task import load_task
from trainer.loop.arithmetic import set_cuda_variables
from trainer.loop.settle import completed
from trainer.loop.state import Inference, load_weights
from trainer.loop.task_checks import collate_of
from trainer.parallel.strategy import Strategy, join
from trainer.run import manifest
from trainer.run.compare import listed_changes, manifest_differences
from trainer.run.digest import digest_of_digests, tensor_digests
from trainer.run.run_record import RunRecord, StoredWeights
from trainer.session.agreement import refuse_difference, refuse_other_classes
from trainer.system.sources import loaded_sources, located_sources
from trainer.use.recorded_figures import VALIDATION

_ATTEMPTS = 5  # to load a checkpoint that a training replaces


@dataclass(frozen=True)
class LoadedWeights:
    """The stored weights that a model has now, and what differs from the run's start.

    Attributes:
        weights: The checkpoint of the weights.
        digest: The digest of the weights, in hex.
        data_digest: The digest of the evaluated dataset, in hex.
        changed: The entries of the manifest that differ, `{name: (old, new)}`.
    """

    weights: StoredWeights
    digest: str
    data_digest: str
    changed: Mapping[str, tuple[Any, Any]]


def settings_of(stored: RunRecord) -> Settings:
    """Return the settings of a run, with all open choices as the run made them.

    The size of a validation batch depends on the number of shards. A run that does not keep
    this number has one shard for each process of its newest start.
    """
    config = completed(stored.config, int(stored.plan["world_size"]))
    return Settings(**dataclasses.asdict(config) | {"batch_size_per_gpu": None})


def join_and_load_task(
    stored: RunRecord, request: Any, device_name: str
) -> tuple[Settings, Strategy, Task]:
    """Join the other ranks and load the task of `stored`, with the settings of the run.

    `request` is the dataclass with the arguments of this call.

    Raises:
        WrongUse: A rank has another request, or the device cannot compute with the settings.
    """
    settings = settings_of(stored)
    # The import of a task may use the GPU.
    if settings.deterministic:
        set_cuda_variables()
    strategy = join(device_name)
    arguments = {"settings": dataclasses.asdict(settings), **dataclasses.asdict(request)}
    refuse_difference(strategy.world, arguments, "start the same command on each machine")
    check(settings, strategy.world.device.type)
    return settings, strategy, load_task(settings.task, settings.fields)


def load_compared(
    job: Inference,
    stored: RunRecord,
    which: str,
    part: str,
    anyway: bool,
    verb: str,
    report: Callable[[str], None],
) -> LoadedWeights:
    """Load the `best` or `last` weights, report them, and compare this start with the run's.

    All ranks must call this. `part` is the evaluated data, such as `validation`.

    Raises:
        WrongUse: The run lacks such weights, they differ between machines, they are of other
            classes, the data are not valid, or a source file of the task has changed and `anyway`
            is false. The message for the last case names the `verb`.
        StorageFailure: The checkpoint is damaged, or the training removed it in each attempt.
    """
    weights, digest = _load(job, stored, which)
    changed, data_digest = _changes(job, stored, part)
    _refuse_changed_sources(stored.path, changed, anyway, verb)
    line = f"{stored.path}: {which} checkpoint, step {weights.step}, weights {digest[:16]}"
    compared = bool(stored.files.entries(weights.step))
    report(line if compared else f"{line}, not compared: digests.jsonl has no entry of this step")
    return LoadedWeights(weights, digest, data_digest, changed)


def _load(job: Inference, stored: RunRecord, which: str) -> tuple[StoredWeights, str]:
    """Load the weights on all ranks, and return where they were and their digest.

    A training that still runs may remove the checkpoint in between, so this tries again.

    Raises:
        WrongUse: The run lacks such weights, has other weights on another machine, or was trained
            with other classes.
        StorageFailure: The checkpoint is damaged, or was removed in each attempt.
    """
    refuse_other_classes(job.task, stored.path, stored.manifest)
    for _ in range(_ATTEMPTS):
        found: StoredWeights | None = None
        # Rank 0 reads whole checkpoints to verify them, which may take long.
        with (
            job.world.wait_for_all("the verification of the checkpoint"),
            contextlib.suppress(FileNotFoundError),
        ):
            if job.world.is_first:
                found = stored.find(which)
        chosen = job.world.from_first(
            [str(found.path), found.step, found.sha256] if found is not None else None
        )
        if chosen is None:
            continue
        weights = StoredWeights(Path(chosen[0]), chosen[1], chosen[2])
        state, digest = None, ""
        with (
            job.world.wait_for_all("the load of the checkpoint"),
            contextlib.suppress(FileNotFoundError),
        ):
            state = stored.load(weights.step)
            digest = digest_of_digests(tensor_digests(state))
        if all(job.world.from_each(state is not None)):
            assert state is not None
            refuse_difference(
                job.world,
                {f"the digest of the weights in {weights.path}": digest},
                "copy the same run to all machines",
            )
            load_weights(job.model, state, job.strategy, weights.path)
            return weights, digest
    raise StorageFailure(
        f"the training in {stored.path} removed each of {_ATTEMPTS} checkpoints before it was "
        "read: train with a larger --keep or --checkpoint-minutes"
    )


def _changes(
    job: Inference, stored: RunRecord, part: str
) -> tuple[dict[str, tuple[Any, Any]], str]:
    """Return what differs from the run's start, and the digest of the evaluated dataset.

    Raises:
        WrongUse: The data differ between ranks.
    """
    dataset = job.evaluation.dataset
    examples, sources_of_reader = manifest.sampled_examples(
        dataset, job.workers, collate_of(job.task)
    )
    digest = manifest.dataset_digest(dataset, examples)
    refuse_difference(job.world, {f"the {part} data": digest}, "copy the same data to all machines")
    sources = sources_of_reader | loaded_sources()
    known = stored.manifest.get("sources", {})
    sources |= located_sources(known.keys() - sources.keys())
    settings = stored.manifest["settings"]
    data = {VALIDATION: digest} if part == VALIDATION else {}
    found = manifest.describe(job.strategy, sys.argv[1:], settings, data, sources)
    before = dict(stored.manifest)
    before["data"] = {name: before.get("data", {}).get(name) for name in data}
    # The number of processes of the newest start counts.
    before["plan"] = stored.plan
    changed = manifest_differences(before, found)
    # The other ranks get lists in JSON.
    agreed = job.world.from_first({name: list(values) for name, values in changed.items()})
    return {name: (old, new) for name, (old, new) in agreed.items()}, digest


def _refuse_changed_sources(
    path: Path, changed: Mapping[str, Any], anyway: bool, verb: str
) -> None:
    """Raise WrongUse if a source file of the task has changed and `anyway` is false."""
    sources = {name: v for name, v in changed.items() if name.startswith("sources.")}
    if sources and not anyway:
        raise WrongUse(
            f"the task of {path} was changed since the run's start ({listed_changes(sources)}): "
            f"restore the old files, or {verb} with the new ones by --anyway"
        )
