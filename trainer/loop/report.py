"""Print the header of a training and its closing summary."""

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from trainbox.classification import counts_by_class
from trainbox.disclosure.suggested_commands import tensorboard
from trainbox.errors import Failure
from trainbox.folders.record_folder import CURVES, METRICS
from trainbox.options.config import CHANNELS_LAST, split_metric
from trainbox.options.optimizers import OPTIMIZERS
from trainbox.processes.environment import launch_facts
from trainbox.processes.streams import printable
from trainer.loop.advice import advice_after, advice_before
from trainer.loop.build import shared_examples
from trainer.loop.model import WithoutAutocast
from trainer.loop.out_of_memory import examples_at_once, has_batch_norm
from trainer.loop.state import Job
from trainer.loop.task_checks import checked
from trainer.records.curves import Curves, draw_curves
from trainer.records.digest import digest_of_digests
from trainer.records.jsonl import read_entries

_DRAWN_AFTER_S = 20.0  # the picture takes 0.4 s, and all records together at most 5 %


def header(job: Job) -> None:
    """Log what is trained, on which hardware and with which settings, below the run's folder."""
    config, world, schedule, model = job.config, job.world, job.schedule, job.state.model
    facts, step = launch_facts(os.environ), job.state.progress.step
    notes = checked(job.task, "notes", job.task.notes(job.train, job.evaluation.dataset))
    keeps_bits = config.shards > 1 and job.strategy.rules.keeps_shards
    rows = {
        "plan": facts.reason or f"{world.world_size} process(es) on {world.device}",
        **job.gpus.rows(),
        "settings": facts.settings,
        "batch": batch_equation(job),
        "shards": f"{config.shards} on {world.world_size} process(es), the same bits on 1 to "
        f"{config.shards}"
        if keeps_bits
        else "",
        "model": f"{type(job.task).__name__}, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters",
        **job.strategy.header(model),
        "init": f"{job.initial['file']}: {job.initial['loaded']}" if job.initial else "",
        "frozen": job.frozen,
        "data": _data_sizes(job),
        "warning": shared_examples(job.in_both, job.evaluation.size, "validation")
        if job.in_both
        else "",
        # A line break, as in the name of a class folder, would begin a row.
        **{printable(name): printable(note) for name, note in notes.items()},
        "optimizer": _optimizer_of_the_task(job),
        "steps": f"{schedule.total_steps:,}, {schedule.steps_per_epoch:,} an epoch",
        "step": _kind_of_step(job),
        "precision": _precision(job),
        "resume": f"from step {step}, epoch {step // schedule.steps_per_epoch + 1}" if step else "",
        "rehearsal": "" if step else job.rehearsal["result"],
        "note": _notes(
            [
                *advice_before(schedule, model, job.state.optimizer, job.task, config, job.train),
                *job.notes,
            ]
        ),
    }
    _report(job, {name: text for name, text in rows.items() if text})


def _report(job: Job, rows: Mapping[str, object], above: str = "") -> None:
    job.run.report(above + "\n".join(f"{name:<10} {value}" for name, value in rows.items()))


def _precision(job: Job) -> str:
    """Return the precision of the run, of RNNs if theirs differs, and what else changes bits."""
    config = job.config
    apart = any(isinstance(module, WithoutAutocast) for module in job.state.model.modules())
    return (
        f"{config.precision}{' (RNN modules in fp32)' if apart else ''}, "
        f"{'deterministic' if config.deterministic else 'fast'}, "
        f"{'channels last, ' if config.memory_format == CHANNELS_LAST else ''}"
        f"{torch.get_num_threads()} CPU thread(s) a process"
    )


def _kind_of_step(job: Job) -> str:
    """Return whether steps are captured and why not, if this was requested."""
    if job.config.capture == "off":
        return ""
    return f"eager: {job.eager}" if job.eager else "captured as CUDA graphs"


def _optimizer_of_the_task(job: Job) -> str:
    """Return the name of an optimizer that differs from `--optimizer`, because the task decides."""
    built, named = type(job.state.optimizer).__name__, job.config.optimizer
    differs = built != OPTIMIZERS[named][0]
    return f"{built}, which the task builds for --optimizer {named}" if differs else ""


def smaller_micro_batches(job: Job, did_not_fit: str) -> None:
    """Log that the batch is split into smaller micro-batches, and why."""
    text = f"{did_not_fit}: restarting with smaller micro-batches of the same batch"
    if has_batch_norm(job.state.model):
        text += f"; batch norm now sees {examples_at_once(job.config)} examples at once"
    _report(job, {"batch": batch_equation(job)}, f"{text}\n")


def batch_equation(job: Job) -> str:
    """Return how a step's examples are divided, such as `384 = 3 GPUs x 128 x 1 accumulation`."""
    config = job.config
    count, noun, each = job.strategy.batch_parts(
        config.batch_size, config.shards, config.accumulation
    )
    return f"{config.batch_size} = {count} {noun} x {each} x {config.accumulation} accumulation"


def _data_sizes(job: Job) -> str:
    """Return the sizes of the datasets, and how they are read."""
    source = f"read by {job.workers} loader workers a process"
    if isinstance(job.train, TensorDataset):
        source = f"held on {job.train.tensors[0].device}"
    elif not job.workers:
        source = "read by the training process"
    shared = "not compared" if job.in_both is None else f"{job.in_both:,} in both"
    return (
        f"{job.schedule.examples:,} training and {job.evaluation.size:,} validation "
        f"examples, {shared}, {source}"
    )


def samples_per_second(job: Job) -> float:
    """Return the speed of the run without its validations, or NaN before the first step."""
    seconds = job.state.progress.train_seconds
    return job.state.progress.step * job.schedule.batch_size / seconds if seconds else math.nan


def closing(job: Job) -> None:
    """Log the results, and the files that have them."""
    progress, path = job.state.progress, job.run.path
    _, name = split_metric(job.config.best_by, "--best-by")
    best, best_weights = "none", ""
    if progress.best_step:
        best = f"{name} {progress.best_metrics[name]:.4f}, step {progress.best_step}"
        best_weights = f"{path}/model.safetensors (the best), "
    if progress.ended_early:
        best += f" (ended early at step {progress.step})"
    digest = digest_of_digests(job.digests(job.state.model_state()))
    rows = {
        "best": best,
        "trained": f"{progress.step:,} steps in {progress.train_seconds:.1f} s, "
        f"{samples_per_second(job):,.0f} samples/s",
        **job.gpus.summary(),
        "weights": f"{best_weights}{path}/checkpoints/ (to resume)" if job.run.is_kept else "",
        "digest": f"{digest} (of the last weights)",
    }
    if job.run.writes and job.run.is_kept:
        rows["metrics"] = f"{path}/metrics.jsonl; to view them: {tensorboard(path.parent)}"
        entries = read_entries(path / METRICS)
        rows |= {"curves": _drawn(job, entries), "note": _notes(_advice(job, entries))}
    width = min(100, shutil.get_terminal_size().columns)
    _report(job, {name: text for name, text in rows.items() if text}, "-" * width + "\n")


def _notes(notes: Sequence[str]) -> str:
    return f"\n{'note':<10} ".join(notes)


def _advice(job: Job, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    names = getattr(job.task, "class_names", ()) if counts_by_class(job.task) else ()
    return advice_after(entries, job.schedule.steps_per_epoch, names)


def _drawn(job: Job, entries: Sequence[Mapping[str, Any]]) -> str:
    """Draw the curves of a training that took long enough, and return the file, or ""."""
    run, metric = job.run, split_metric(job.config.best_by, "--best-by")
    if job.state.progress.train_seconds < _DRAWN_AFTER_S:
        return ""
    try:
        draw_curves([Curves(run.path.name, entries, *metric)], run.path / CURVES)
    except (ImportError, Failure) as error:
        run.report(f"{run.path / CURVES} is missing: {error}")
        return ""
    return f"{run.path / CURVES}"
