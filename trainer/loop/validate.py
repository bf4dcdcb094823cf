"""A validation during a training: evaluate, keep the best checkpoint, decide whether to end."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainbox.classification import counts_by_class, most_mistaken, wrong
from trainbox.errors import WrongUse
from trainbox.options.config import split_metric
from trainbox.tensor_trees import copied, joined, take, tensors_in
from trainer.load_task import defines
from trainer.loop.evaluate import Evaluation, evaluate
from trainer.loop.log import TrainingLog
from trainer.loop.losses import autocast
from trainer.loop.pace import Pace
from trainer.loop.saving import Saving
from trainer.loop.state import Inference, Job
from trainer.loop.task_checks import checked, checked_end, drawn_figures

_METRICS_OF_A_LINE = 6  # metrics.jsonl has all of them


def evaluation_due(job: Job) -> bool:
    """Return whether the current step is one after which the training validates."""
    every = job.config.eval_every * job.schedule.steps_per_epoch
    progress = job.state.progress
    return progress.evaluated_step < progress.step and (
        progress.step % every == 0 or progress.step >= job.schedule.total_steps
    )


def validate(
    job: Job,
    saving: Saving,
    log: TrainingLog,
    pace: Pace,
    validated: Callable[[int, Mapping[str, float]], None] | None,
) -> bool:
    """Validate, and call `validated` with the step and the metrics; return False if stopped.

    The training time does not include the validation.
    """
    with job.state.watch.paused():
        metrics = _validate(job, saving, log, pace)
        if metrics is not None and validated is not None:
            validated(job.state.progress.step, metrics)
    return metrics is not None


def _validate(job: Job, saving: Saving, log: TrainingLog, pace: Pace) -> Mapping[str, float] | None:
    """Evaluate, update the progress, record and save; return the metrics, or None if stopped."""
    progress, config = job.state.progress, job.config

    # Compute the metrics of the whole validation set.
    seed_parts = (config.seed, "validation", progress.step)
    result = evaluate(job, seed_parts, saving.stopped, shown=job.run.console.validation_bar)
    if result is None:
        return None
    progress.evaluated_step = progress.step

    # Compare with the best validation. All ranks use the answer of the task on rank 0.
    best = judge(job, result.metrics)
    _report_nan(job, result)
    progress.ended_early, late = job.world.from_first(
        [progress.ended_early, job.checkpoints.best_is_late()]
    )

    # Record the metrics, and save the best and the last step. If the last save was just before, a
    # new best stays in memory until the next save.
    epoch = progress.step / job.schedule.steps_per_epoch
    shown = [f"{name} {value:.4f}" for name, value in result.metrics.items()][:_METRICS_OF_A_LINE]
    if len(shown) < len(result.metrics):
        shown.append("...")
    training = log.line_at(progress.step)
    last = progress.step >= job.schedule.total_steps or progress.ended_early
    with pace.measured(pace.validations):
        job.run.record(
            "validation",
            progress.step,
            math.ceil(epoch),
            result.figures,
            f"epoch {epoch:g}: {', '.join(shown)}{' (best)' if best else ''}"
            f"{training and f'; {training}'}",
        )
        if best or last:
            saving.save(result.metrics, later=not (last or late))

    # Draw the task's pictures of the best and the last step.
    if (best or last) and defines(job.task, "figures"):
        # Do not draw while a thread draws: matplotlib cannot draw in two threads at once. The
        # pictures of the last step do not replace the pictures of the best.
        with job.world.wait_for_all("the earlier pictures"):
            job.run.board.finish_pictures() if last else job.run.board.wait_for_pictures()
        with job.strategy.wait_for_all("the pictures"):
            if job.run.writes or job.strategy.forward_is_collective:
                job.run.board.pictures(progress.step, best, draw(job, result, seed_parts))
    return result.metrics


@torch.no_grad()
def draw(
    job: Inference, result: Evaluation, seed_parts: tuple[int | str, ...]
) -> Callable[[], dict[str, Tensor]]:
    """Return a function that draws the task's pictures of `result`, in any thread.

    `result` is the evaluation that was seeded by `seed_parts`. A Classification shows its wrong
    examples first, from all batches of the validation set. All ranks must call this if the
    strategy's forward is collective. The model is used only in this call.
    """
    dtype = job.strategy.inference_dtype(job.autocast_dtype)
    with job.evaluating(), autocast(job.world.device.type, dtype):
        batch = _with_mistakes_first(job, result, seed_parts)
        figures = job.inside(lambda: job.task.figures(job.model, batch, copied(result.totals)))
    # The task may change its tensors, and another thread must not wait for the GPU.
    kept = {
        name: figure.detach().cpu().clone() if isinstance(figure, Tensor) else figure
        for name, figure in checked(job.task, "figures", figures).items()
    }
    return functools.partial(drawn_figures, job.task, kept)


def _with_mistakes_first(
    job: Inference, result: Evaluation, seed_parts: tuple[int | str, ...]
) -> Any:
    """Return a batch of the same size as the first batch, with mistaken examples first."""
    if not counts_by_class(job.task) or "confusion" not in result.by_batch:
        return result.first_batch
    numbers = most_mistaken(result.by_batch["confusion"])
    if not numbers:
        return result.first_batch
    mistaken_B = job.inside(lambda: wrong(job.model, copied(result.first_batch)))
    read = iter(job.evaluation.read([number for number in numbers if number]))
    parts = []
    for number in numbers:
        if number == 0:
            parts.append(take(result.first_batch, mistaken_B.nonzero().flatten()))
            continue
        job.world.seed(*seed_parts, number)
        batch = job.task.prepare(next(read), training=False)
        wrong_B = job.inside(lambda batch=batch: wrong(job.model, copied(batch)))  # type: ignore[misc]
        parts.append(take(batch, wrong_B.nonzero().flatten()))
    others = take(result.first_batch, (~mistaken_B).nonzero().flatten())
    return joined([*parts, others], len(tensors_in(result.first_batch)[0]))


def _report_nan(job: Job, result: Evaluation) -> None:
    """Report a metric for the best checkpoint that is NaN, with the examples that have NaN."""
    _, name = split_metric(job.config.best_by, "--best-by")
    if math.isnan(result.metrics[name]) and job.run.writes:
        job.run.report(
            f"step {job.state.progress.step}: {name} of the validation is NaN, so this checkpoint "
            f"cannot be the best: {_examples_with_nan(job, result)}"
        )


def _examples_with_nan(job: Inference, result: Evaluation) -> str:
    """Return which examples of the validation have NaN, or what to check if none has."""
    nan_batches = {
        number
        for value_N in result.by_batch.values()
        for number in value_N.reshape(len(value_N), -1).isnan().any(1).nonzero().flatten().tolist()
    }
    if not nan_batches:
        return "check the validation data and metrics()"
    number = min(nan_batches)
    start, stop = job.evaluation.bounds(number)
    (batch,) = job.evaluation.read([number])
    for index in range(stop - start):
        values = [value[index] for value in tensors_in(batch) if len(value) == stop - start]
        if any(value.isnan().any() for value in values):
            return f"example {start + index} of validation_dataset() has NaN"
    return f"the statistics of its examples {start} to {stop - 1} are NaN: check losses()"


def judge(job: Job, metrics: Mapping[str, float]) -> bool:
    """Update the progress, and return whether `metrics` are the best so far.

    The training ends early if the patience is used up, or if the task has reached its aim.

    Raises:
        WrongUse: The task does not have the metric of an option, or its method returns no bool.
    """
    progress, config = job.state.progress, job.config
    if defines(job.task, "schedule"):  # nothing else reads them, and each checkpoint has them
        progress.validations.append(dict(metrics))
    _, name = split_metric(config.best_by, "--best-by")
    best = _is_better(metrics, config.best_by, "--best-by", progress.best_metrics.get(name))
    if best:
        progress.best_step, progress.best_metrics = progress.step, dict(metrics)
    if (spec := config.early_stopping) is not None:
        option = "--early-stopping"
        if _is_better(metrics, spec, option, progress.patience_best):
            progress.patience_best = metrics[split_metric(spec, option)[1]]
            progress.patience_used = 0
        else:
            progress.patience_used += 1
        progress.ended_early = progress.patience_used >= config.patience
    with job.leaves_the_model("finished()"):
        progress.ended_early |= checked_end(job.task, job.task.finished(metrics))
    return best


def _is_better(metrics: Mapping[str, float], spec: str, option: str, best: float | None) -> bool:
    """Return whether the metric that `spec` names is better than `best`.

    Raises:
        WrongUse: The task does not have this metric.
    """
    direction, name = split_metric(spec, option)
    if name not in metrics:
        remedy = "name one of them"
        if option == "--best-by":  # which may be the default of the task
            remedy += " with --best-by, or as best_by in the class of the task"
        raise WrongUse(
            f"{option} {spec}: the task has no metric {name}; it has {', '.join(metrics)}: {remedy}"
        )
    value = metrics[name]
    return not math.isnan(value) and (
        best is None or (value < best if direction == "min" else value > best)
    )
