"""Run one call of `evaluate`: compute the figures of a stored checkpoint again, or on other data.

The run's folder is only read, so the run may still train. The results go to a folder of their own.
"""

import contextlib
import dataclasses
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainbox.files import replacing
from trainer.errors import Differs, Preempted, StorageFailure, WrongUse
from trainer.loop.arithmetic import set_cuda_variables
from trainer.loop.build import build_inference
from trainer.loop.evaluate import Evaluation, evaluate
from trainer.loop.preflight_labels import check_labels
from trainer.loop.state import Inference, load_weights
from trainer.loop.validate import draw
from trainer.parallel.strategy import join
from trainer.parallel.world import World
from trainer.pictures import write_png
from trainer.records import manifest
from trainer.records.compare import (
    listed_changes,
    manifest_differences,
)
from trainer.records.console import Console
from trainer.records.digest import digest_of_digests, tensor_digests
from trainer.records.stored_weights import StoredWeights, find_weights, load_state
from trainer.session.agreement import refuse_difference
from trainer.session.failures import errors_as_failures
from trainer.session.recorded_figures import TEST, VALIDATION, compare_figures, recorded_figures
from trainer.session.stored_run import StoredRun
from trainer.settings.config import check
from trainer.system.signals import StopRequest
from trainer.system.sources import loaded_sources, located_sources
from trainer.system.temporary import sockets_in_a_folder
from trainer.task import Task
from trainer.task_loading.load import load_task

_ATTEMPTS = 5  # to load a checkpoint that a training replaces


@sockets_in_a_folder()
def evaluate_run(
    path: Path,
    stop: StopRequest,
    device_name: str,
    data_dir: Path,
    which: str,
    part: str,
    out: Path | None,
    anyway: bool,
) -> None:
    """Evaluate the checkpoint `which` of the run in `path` on the `part` of its data.

    The results are printed and written to the folder `out`, or to a folder in the run's folder. If
    the run has a validation of the same step and data, the figures are compared with it. With
    `anyway`, changed source files of the task are accepted.

    Raises:
        Differs: The figures differ from those of the training, and nothing explains it.
        WrongUse: The run cannot be evaluated.
    """
    stored = StoredRun.read(path)
    out = out or path / "evaluations" / f"{which}-{part}"
    with errors_as_failures(out):
        settings = stored.settings()
        if settings.deterministic:
            set_cuda_variables()
        strategy = join(device_name)
        world = strategy.world
        arguments = {"run": dataclasses.asdict(settings), "checkpoint": which, "data": part}
        refuse_difference(world, arguments, "start the same command on each machine")
        check(settings, world.device.type)
        task = load_task(settings.task, settings.fields)
        if part == TEST and type(task).test_dataset is Task.test_dataset:
            raise WrongUse(
                f"task {type(task).__name__} has no method test_dataset(): define it, or use "
                f"--data {VALIDATION}"
            )
        _make_folder(out)
        log = out / f"rank-{world.rank}.log"
        with (
            contextlib.closing(Console(log, world.is_first)) as console,
            errors_as_failures(out, type(task).__name__, log),
        ):
            job = build_inference(settings, task, strategy, data_dir, part == TEST)
            weights, digest = _load(job, stored, which)
            changed, data_digest = _changes(job, stored, part)
            _refuse_changed_sources(path, changed, anyway)
            console.report(
                f"{path}: {which} checkpoint, step {weights.step}, weights {digest[:16]}"
            )
            if changed:
                console.report(f"changed since the run's start: {listed_changes(changed)}")
            # The seed is that of the validation after this step of the training.
            seed_parts = (settings.seed, "validation", weights.step)
            result = evaluate(job, seed_parts, lambda: _stopped(world, stop))
            if result is None:
                world.leave()
                raise Preempted(
                    f"stopped by {stop.signal_name or 'a signal to another process'} before the "
                    "end of the evaluation: start the same command again"
                )
            figures = recorded_figures(result)
            comparison = compare_figures(stored, figures, weights.step, part, changed)
            pictures = {}
            if world.is_first or strategy.forward_is_collective:
                pictures = draw(job, result, seed_parts)
            if world.is_first:
                entry = _entry(stored, job, which, part, weights, digest)
                entry |= {"data_dir": str(data_dir), "data_digest": data_digest}
                entry |= {"changed": dict(changed), "training": comparison.entry()}
                entry |= {"figures": figures}
                _write(out, entry, pictures)
                _print(console, job, result, part)
                console.report(f"  {comparison.line}")
                console.report(f"  written to {out}")
        world.leave()
        if comparison.equal is False and comparison.unexplained:
            raise Differs(f"DIFFERENT FIGURES: {path}: {comparison.line}")


def _load(job: Inference, stored: StoredRun, which: str) -> tuple[StoredWeights, str]:
    """Load the weights on all ranks, and return where they were and their digest.

    A training that still runs may remove the checkpoint in between, so this tries again.
    """
    for _ in range(_ATTEMPTS):
        found: StoredWeights | None = None
        if job.world.is_first:
            with contextlib.suppress(FileNotFoundError):
                found = find_weights(stored.path, stored.run_id, which)
        chosen = job.world.from_first(
            [str(found.path), found.step, found.sha256] if found is not None else None
        )
        if chosen is None:
            continue
        weights = StoredWeights(Path(chosen[0]), chosen[1], chosen[2])
        state = None
        with contextlib.suppress(FileNotFoundError):
            state = load_state(stored.path, stored.run_id, weights.step)
        if all(job.world.from_each(state is not None)):
            assert state is not None
            load_weights(job.model, state, job.strategy, weights.path)
            return weights, digest_of_digests(tensor_digests(state))
    raise StorageFailure(
        f"the training in {stored.path} removed each of {_ATTEMPTS} checkpoints before it was "
        "read: train with a larger --keep or --checkpoint-minutes"
    )


def _changes(
    job: Inference, stored: StoredRun, part: str
) -> tuple[dict[str, tuple[Any, Any]], str]:
    """Return what differs from the run's start, and the digest of the evaluated dataset.

    Raises:
        WrongUse: The data differ between ranks, or a label is not valid.
    """
    dataset = job.evaluation.dataset
    examples, sources_of_reader = manifest.sampled_examples(dataset, job.workers)
    check_labels(job, part, dataset, examples)
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
    return job.world.from_first(_plain(changed)), digest


def _plain(changed: Mapping[str, tuple[Any, Any]]) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in changed.items()}


def _refuse_changed_sources(path: Path, changed: Mapping[str, Any], anyway: bool) -> None:
    sources = {name: v for name, v in changed.items() if name.startswith("sources.")}
    if sources and not anyway:
        raise WrongUse(
            f"the task of {path} was changed since the run's start ({listed_changes(sources)}): "
            "restore the old files, or evaluate with the new ones by --anyway"
        )


def _stopped(world: World, stop: StopRequest) -> bool:
    return bool(world.vote(bool(stop))[0])


def _entry(
    stored: StoredRun,
    job: Inference,
    which: str,
    part: str,
    weights: StoredWeights,
    digest: str,
) -> dict[str, Any]:
    """Return the content of evaluation.json."""
    return {
        "run": str(stored.path),
        "run_id": stored.run_id,
        "task": stored.config.task,
        "checkpoint": which,
        "step": weights.step,
        "weights_sha256": digest,
        "checkpoint_sha256": weights.sha256,
        "data": part,
        "examples": job.evaluation.size,
        "batch_size": job.evaluation.batch_size,
        "precision": job.config.precision,
        "device": job.world.device.type,
        "strategy": job.strategy.name,
        "world_size": job.world.world_size,
        "host": platform.node(),
    }


def _print(console: Console, job: Inference, result: Evaluation, part: str) -> None:
    console.report(f"{part}: {job.evaluation.size:,} examples")
    width = max(map(len, result.metrics), default=0)
    for name, value in result.metrics.items():
        console.report(f"  {name:{width}}  {value:.6g}")


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(out, error) from error


def _write(out: Path, entry: Mapping[str, Any], pictures: Mapping[str, Any]) -> None:
    """Write the pictures and then evaluation.json, which replaces that of an earlier call."""
    try:
        for name, picture in pictures.items():
            write_png(out / f"{name.replace('/', '-')}.png", picture)
        with replacing(out / "evaluation.json") as file:
            file.write(json.dumps(entry, indent=2).encode() + b"\n")
    except OSError as error:
        raise _not_writable(out, error) from error


def _not_writable(out: Path, error: OSError) -> StorageFailure:
    return StorageFailure(
        f"{out} cannot be written ({error.strerror or error}): set another folder with --out FOLDER"
    )
