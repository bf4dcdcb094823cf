"""Print the header of a training and its closing summary."""

import math
import os
import shutil

import torch
from torch.utils.data import TensorDataset

from trainbox.contract.config import CHANNELS_LAST, split_metric
from trainbox.contract.hints import tensorboard
from trainbox.contract.launch_facts import launch_facts
from trainbox.contract.optimizers import OPTIMIZERS
from trainbox.contract.streams import printable
from trainer.loop.out_of_memory import examples_at_once, has_batch_norm
from trainer.loop.rnn_precision import WithoutAutocast
from trainer.loop.state import Job
from trainer.loop.task_checks import checked
from trainer.run.digest import digest_of_digests


def header(job: Job) -> None:
    """Log what is trained, on which hardware and with which settings."""
    config, world, schedule = job.config, job.world, job.schedule
    facts = launch_facts(os.environ)
    notes = checked(job.task, "notes", job.task.notes(job.train, job.evaluation.dataset))
    rows = {
        "run": str(job.run.path),
        "plan": facts.reason or f"{world.world_size} process(es) on {world.device}",
        **job.gpus.rows(),
        **({"settings": facts.settings} if facts.settings else {}),
        "batch": batch_equation(job),
        **(
            {
                "shards": f"{config.shards} on {world.world_size} process(es), the "
                "same bits on 1 "
                f"to {config.shards}"
            }
            if (config.shards or 1) > 1 and job.strategy.keeps_shards
            else {}
        ),
        "model": f"{type(job.task).__name__}, "
        f"{sum(p.numel() for p in job.state.model.parameters()):,} parameters",
        **job.strategy.header(job.state.model),
        **({"init": f"{job.initial['file']}: {job.initial['loaded']}"} if job.initial else {}),
        **({"frozen": job.frozen} if job.frozen else {}),
        "data": _data_sizes(job),
        # A line break, as in the name of a class folder, would begin a row.
        **{printable(name): printable(note) for name, note in notes.items()},
        **_optimizer_of_the_task(job),
        "steps": f"{schedule.total_steps:,}, {schedule.steps_per_epoch:,} an epoch",
        "precision": f"{_precision(job)}, {'deterministic' if config.deterministic else 'fast'}, "
        f"{'channels last, ' if config.memory_format == CHANNELS_LAST else ''}"
        f"{torch.get_num_threads()} CPU thread(s) a process",
    }
    if not job.state.progress.step:
        rows["rehearsal"] = job.rehearsal["result"]
    else:
        rows["resume"] = (
            f"from step {job.state.progress.step}, epoch "
            f"{job.state.progress.step // schedule.steps_per_epoch + 1}"
        )
    job.run.report("\n".join(f"{name:<10} {value}" for name, value in rows.items()))


def _precision(job: Job) -> str:
    """Return the precision of the run, and that of RNNs if it differs."""
    apart = any(isinstance(module, WithoutAutocast) for module in job.state.model.modules())
    return f"{job.config.precision}{' (RNN modules in fp32)' if apart else ''}"


def _optimizer_of_the_task(job: Job) -> dict[str, str]:
    """Return a row for an optimizer that differs from `--optimizer`, because the task decides."""
    built, named = type(job.state.optimizer).__name__, job.config.optimizer
    return (
        {}
        if built == OPTIMIZERS[named][0]
        else {"optimizer": f"{built}, which the task builds for --optimizer {named}"}
    )


def smaller_micro_batches(job: Job, did_not_fit: str) -> None:
    """Log that the batch is split into smaller micro-batches, and why."""
    norm = ""
    if has_batch_norm(job.state.model):
        norm = f"; batch norm now sees {examples_at_once(job.config)} examples at once"
    job.run.report(
        f"{did_not_fit}: restarting with smaller micro-batches of the same batch"
        f"{norm}\n{'batch':<10} "
        f"{batch_equation(job)}"
    )


def batch_equation(job: Job) -> str:
    """Return how a step's examples are divided, such as `384 = 3 GPUs x 128 x 1 accumulation`."""
    config = job.config
    count, noun, each = job.strategy.batch_parts(
        config.batch_size, config.shards, config.accumulation
    )
    return f"{config.batch_size} = {count} {noun} x {each} x {config.accumulation} accumulation"


def _data_sizes(job: Job) -> str:
    """Return the sizes of the datasets, and how they are read."""
    source = "read by " + (
        f"{job.workers} loader workers a process" if job.workers else "the training process"
    )
    if isinstance(job.train, TensorDataset):
        source = f"held on {job.train.tensors[0].device}"
    return (
        f"{job.schedule.examples:,} training and {job.evaluation.size:,} validation "
        f"examples, {source}"
    )


def samples_per_second(job: Job) -> float:
    """Return the speed of the run without its validations, or NaN before the first step."""
    seconds = job.state.progress.train_seconds
    return job.state.progress.step * job.schedule.batch_size / seconds if seconds else math.nan


def closing(job: Job) -> None:
    """Log the results, and the files that have them."""
    config, progress, path = job.config, job.state.progress, job.run.path
    _, name = split_metric(config.best_by, "--best-by")
    steps = progress.step
    speed = samples_per_second(job)
    best = (
        f"{name} {progress.best_metrics[name]:.4f}, step {progress.best_step}"
        if progress.best_metrics
        else "none"
    )
    digest = digest_of_digests(job.digests(job.state.model.state_dict()))
    best_weights = f"{path}/model.safetensors (the best), " if progress.best_step else ""
    rows = {
        "best": best + (f" (ended early at step {steps})" if progress.ended_early else ""),
        "trained": f"{steps:,} steps in {progress.train_seconds:.1f} s, {speed:,.0f} samples/s",
        **job.gpus.summary(),
        "weights": f"{best_weights}{path}/checkpoints/ (to resume)",
        "digest": f"{digest} (of the last weights)",
        "metrics": f"{path}/metrics.jsonl; to view them: {tensorboard(path.parent)}",
    }
    width = min(100, shutil.get_terminal_size().columns)
    job.run.report(
        "-" * width + "\n" + "\n".join(f"{key:<10} {value}" for key, value in rows.items())
    )
