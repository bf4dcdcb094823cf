"""The loop.

Read this file first: one optimizer step from the batch to the log stands in `fit`, in order.
"""

import contextlib
import functools
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from trainer.classification import counts_by_class, most_mistaken, wrong
from trainer.data.batches import epoch_order, joined, take, tensors_in, training_batches
from trainer.errors import Preempted, WrongUse
from trainer.loop.evaluate import Evaluation, evaluate
from trainer.loop.guard import check_unchanged
from trainer.loop.log import not_finite, write_entry
from trainer.loop.losses import autocast
from trainer.loop.out_of_memory import FIRST_STEPS, all_fit
from trainer.loop.state import Job
from trainer.loop.task_checks import checked_end, checked_factor, checked_figures
from trainer.parallel.buffers import evaluating
from trainer.records.digest import digest_of_digests, tensor_digest, tensor_digests
from trainer.settings.config import split_metric
from trainer.system.signals import StopRequest

# Shape suffixes: B examples of a micro-batch.

_FIGURES_OF_A_LINE = 6  # all are in metrics.jsonl


def fit(job: Job, stop: StopRequest) -> None:
    """Train to the end of the schedule, from wherever `job.progress` stands.

    Raises:
        Preempted: `stop` was requested on some process, and a checkpoint of this step is saved.
        NotFinite: a loss or a weight is infinite or NaN; nothing of it was saved.
        StorageFailure: a checkpoint or the metrics could not be written.
        DoesNotFit: the memory was used up at the first steps; the job is not fit for use any more.
    """
    config, world, progress, schedule = job.config, job.world, job.progress, job.schedule
    batches = training_batches(job.train, schedule, progress.step, world.device, job.workers)
    if job.around_batches is not None:
        batches = job.around_batches(batches)
    warmup_steps = round(config.warmup_epochs * schedule.steps_per_epoch)
    # Sums over the global batch's size, so that every number of processes and parts has the same
    # gradient.
    weights_B = [
        torch.full((micro.size,), 1 / schedule.batch_size, device=world.device)
        for micro in schedule.micros
    ]
    digest_steps = config.digest_steps or schedule.steps_per_epoch
    first_step = progress.step
    _record_digests(job, "resume" if first_step else "start")
    job.watch.start(first_step)
    job.model.train()
    while True:
        if progress.evaluated_step < progress.step and _evaluation_due(job):
            with job.watch.paused():
                validated = _validate(job, stop)
            if not validated:
                _save_and_stop(job, stop)
        if progress.step >= job.end_step or progress.ended_early:
            break

        factor = checked_factor(
            job.task, job.task.schedule(progress.step, schedule.total_steps, warmup_steps)
        )
        for group in job.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        before = (
            [buffer.clone() for buffer in _statistics(job.model)] if config.skip_nonfinite else []
        )
        job.reduction.overlaps = progress.step >= first_step + FIRST_STEPS
        with contextlib.nullcontext() if job.reduction.overlaps else all_fit(job.strategy):
            for micro, weight_B in zip(schedule.micros, weights_B, strict=True):
                batch = next(batches)
                world.seed(config.seed, "forward", progress.step, micro.shard, micro.part)
                with job.reduction.of(micro):
                    losses_B = job.loss_module(batch)
                    trained_B = [loss_B for loss_B in losses_B.values() if loss_B.requires_grad]
                    torch.autograd.backward(
                        trained_B, [job.scaler.scale(weight_B)] * len(trained_B)
                    )
                job.running.add(losses_B)
        job.reduction.finish()
        job.running.steps += 1
        progress.step += 1
        logged = 0 in (
            progress.step % config.log_steps,
            progress.step % schedule.steps_per_epoch,
            progress.step - job.end_step,
        )
        norm = _gradient_norm(job) if logged or config.clip_norm or config.skip_nonfinite else None
        _update(job, norm, before)
        job.model.zero_grad()  # also what the optimizer has not

        job.run.advance()
        if logged and norm is not None:
            write_entry(job, norm)
        if progress.step % digest_steps == 0 or progress.step == job.end_step:
            _record_digests(job, "step")
        if progress.step == first_step + 1:
            _prepare_checkpoints(job)
        _save_or_stop(job, stop)
    job.checkpoints.wait()
    progress.train_seconds = job.watch.seconds


def _record_digests(job: Job, kind: str) -> None:
    """Digests of the weights, of the optimizer's state and of the epoch's order, in digests.jsonl.

    Raises:
        WrongUse: they are not the same on all processes.
    """
    check_unchanged(job)
    names = {parameter: name for name, parameter in job.model.named_parameters()}
    model, optimizer = (
        job.digests(tensors)
        for tensors in (job.model.state_dict(), _named(names, job.optimizer.state))
    )
    short = [digest[:16] for digest in (*model.values(), *optimizer.values())]
    if (place := job.world.first_difference(short)) is not None:
        raise WrongUse(
            f"task {type(job.task).__name__}: the processes differ at step "
            f"{job.progress.step}, first in "
            f"{[*model, *optimizer][place]}: it draws random numbers of its own, or does "
            "not do the same on each process; "
            "torch's generators are seeded for it"
        )
    job.checkpoints.wait_until_recorded()  # the entries are in the order of the steps
    job.run.folder.append_digests(_entry(job, kind, job.progress.step, model, optimizer))
    job.digested_step = job.progress.step


def _entry(
    job: Job, kind: str, step: int, model: Mapping[str, str], optimizer: Mapping[str, str]
) -> dict[str, Any]:
    """One of digests.jsonl: `model` and `optimizer` are digests of tensors, by name."""
    epoch = max(0, step - 1) // job.schedule.steps_per_epoch
    order = tensor_digest(epoch_order(job.schedule.seed, epoch, job.schedule.examples))
    whole = {
        "model": digest_of_digests(model),
        "optimizer": digest_of_digests(optimizer),
        "order": order,
    }
    tensors = {name: digest[:16] for name, digest in {**model, **optimizer}.items()}
    return {"kind": kind, "step": step, **whole, "tensors": tensors}


def _named(
    names: Mapping[nn.Parameter, str], state: Mapping[Any, Mapping[str, Any]]
) -> dict[str, Tensor]:
    """The tensors of an optimizer's state, in the order of the parameters' `names`."""
    return {
        f"optimizer.{name}.{key}": value
        for parameter, name in names.items()
        for key, value in state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _evaluation_due(job: Job) -> bool:
    every = job.config.eval_every * job.schedule.steps_per_epoch
    return job.progress.step % every == 0 or job.progress.step >= job.schedule.total_steps


def _save_or_stop(job: Job, stop: StopRequest) -> None:
    """A checkpoint if one is due on any process, and the end if any was told to stop."""
    stop_now, save_now = job.world.vote(
        bool(stop), job.checkpoints.due(job.config.checkpoint_minutes)
    )
    if stop_now:
        _save_and_stop(job, stop)
    if (
        save_now
        or job.save_due
        or (job.config.checkpoint_steps and job.progress.step % job.config.checkpoint_steps == 0)
    ):
        job.save_due = False
        _save(job, {})


def _save_and_stop(job: Job, stop: StopRequest) -> NoReturn:
    _save(job, {})
    job.checkpoints.wait()
    job.world.leave()
    raise Preempted(
        f"stopped by {stop.signal_name or 'a signal to another process'} at step "
        f"{job.progress.step} of "
        f"{job.schedule.total_steps}, checkpoint saved: the same command goes on from there"
    )


def _validate(job: Job, stop: StopRequest) -> bool:
    """As `_validated`, after which plain attributes are as before: no training may depend on what
    validations leave there.
    """
    check_unchanged(job)
    with job.attributes.kept():
        return _validated(job, stop)


def _validated(job: Job, stop: StopRequest) -> bool:
    """Evaluate, note the best and whether to end early, and save if there is a reason to; False if
    told to stop.
    """
    progress, config = job.progress, job.config

    def stopped() -> bool:
        stop_now, save_now = job.world.vote(bool(stop), False)
        job.save_due |= save_now  # the answer to a wish of the step before
        return stop_now

    seed_parts = (config.seed, "validation", progress.step)
    result = evaluate(
        job.task,
        job.model,
        job.evaluation,
        job.world,
        job.autocast_dtype,
        seed_parts,
        stopped,
        job.inside,
    )
    if result is None:
        return False
    progress.evaluated_step = progress.step
    best = compare(
        result.metrics,
        config.best_by,
        "--best-by",
        progress.best_metrics.get(split_metric(config.best_by, "")[1]),
    )
    if best:
        progress.best_step, progress.best_metrics = progress.step, result.metrics
    if config.early_stopping is not None:
        _, name = split_metric(config.early_stopping, "--early-stopping")
        if compare(
            result.metrics, config.early_stopping, "--early-stopping", progress.patience_best
        ):
            progress.patience_best, progress.patience_used = result.metrics[name], 0
        else:
            progress.patience_used += 1
        progress.ended_early = progress.patience_used >= config.patience
    epoch = progress.step / job.schedule.steps_per_epoch
    shown = [f"{name} {value:.4f}" for name, value in result.metrics.items()][:_FIGURES_OF_A_LINE]
    figures = ", ".join(shown if len(shown) == len(result.metrics) else [*shown, "..."])
    tables = {name: total.tolist() for name, total in result.totals.items() if total.ndim}
    job.run.record(
        "validation",
        progress.step,
        math.ceil(epoch),
        {**result.metrics, **tables},
        f"epoch {epoch:g}: {figures}{' (best)' if best else ''}",
    )
    progress.ended_early |= job.world.from_first(
        checked_end(job.task, job.task.finished(result.metrics))
    )
    last = progress.step >= job.schedule.total_steps or progress.ended_early
    if best or last:
        _save(job, result.metrics)
        if job.run.writes or job.strategy.forward_is_collective:
            job.run.board.pictures(progress.step, draw(job, result))
    if job.validated is not None:
        job.validated(progress.step, result.metrics)
    return True


@torch.no_grad()
def draw(job: Job, result: Evaluation) -> dict[str, Tensor]:
    """Return the task's pictures of `result`; under --strategy fsdp all processes must call this.

    A Classification gets its wrong examples first, of all batches of the validation set.
    """
    dtype = job.strategy.inference_dtype(job.autocast_dtype)
    with evaluating(job.model), autocast(job.world.device.type, dtype):
        batch = _with_mistakes_first(job, result)
        drawn = job.inside(lambda: job.task.figures(job.model, batch, result.totals))
    return checked_figures(job.task, drawn)


def _with_mistakes_first(job: Job, result: Evaluation) -> Any:
    """Return a batch as large as the first: the examples that the model mistakes, then those of the
    first batch.
    """
    if not counts_by_class(job.task) or "confusion" not in result.by_batch:
        return result.first_batch
    numbers = most_mistaken(result.by_batch["confusion"])
    if not numbers:
        return result.first_batch
    mistaken_B = job.inside(lambda: wrong(job.model, result.first_batch))
    read = iter(job.evaluation.read([number for number in numbers if number]))
    parts = []
    for number in numbers:
        if number == 0:
            parts.append(take(result.first_batch, mistaken_B.nonzero().flatten()))
            continue
        job.world.seed(job.config.seed, "validation", job.progress.step, number)
        batch = job.task.prepare(next(read), training=False)
        wrong_B = job.inside(lambda batch=batch: wrong(job.model, batch))  # type: ignore[misc]
        parts.append(take(batch, wrong_B.nonzero().flatten()))
    others = take(result.first_batch, (~mistaken_B).nonzero().flatten())
    return joined([*parts, others], len(tensors_in(result.first_batch)[0]))


def compare(metrics: Mapping[str, float], spec: str, option: str, best: float | None) -> bool:
    """Whether the metric that `spec` names is better than `best`.

    Raises:
        WrongUse: there is no such metric.
    """
    direction, name = split_metric(spec, option)
    if name not in metrics:
        raise WrongUse(
            f"{option} {spec}: the task has no metric {name}; it has {', '.join(metrics)}"
        )
    value = metrics[name]
    return not math.isnan(value) and (
        best is None or (value < best if direction == "min" else value > best)
    )


def _prepare_checkpoints(job: Job) -> None:
    """After a start's first step: everything that a step needs is loaded, and the optimizer has its
    state.
    """
    check_unchanged(job)
    job.checkpoints.prepare(job.state())


def _save(job: Job, metrics: Mapping[str, float]) -> None:
    """Start a checkpoint of this step; all processes must call it, the first one writes."""
    check_unchanged(job)
    state = job.state()
    for name, sums in state["running"].items():
        if not all(map(math.isfinite, sums)):
            raise not_finite(job, f"loss {name!r}")
    step = job.progress.step
    record = None
    if job.digested_step != step:
        # Now: under --strategy fsdp a forward puts other parameters in the place of these for a
        # while.
        names = {parameter: name for name, parameter in job.model.named_parameters()}
        record = functools.partial(_record_saved, job, step, names)
    job.checkpoints.save(step, state, metrics, job.progress.best_step, record)
    job.digested_step = step


def _record_saved(
    job: Job, step: int, names: Mapping[nn.Parameter, str], state: Mapping[str, Any]
) -> None:
    """Digests of a checkpoint's `state`, so that `verify` can tell whether the file is still that;
    the saving thread's work.
    """
    parameters = (
        parameter for group in job.optimizer.param_groups for parameter in group["params"]
    )
    moments = {
        parameter: state["optimizer"]["state"].get(index, {})
        for index, parameter in enumerate(parameters)
    }
    model, optimizer = tensor_digests(state["model"]), tensor_digests(_named(names, moments))
    job.run.folder.append_digests(_entry(job, "checkpoint", step, model, optimizer))


def _update(job: Job, norm: Tensor | None, before: list[Tensor]) -> None:
    """Give the gradient to the optimizer; under --skip-nonfinite take back what a step with a bad
    one has left.

    The gradient is the sum over all processes, so all take the same way. fp16's scaler has a way of
    its own.
    """
    progress, most = job.progress, job.config.skip_nonfinite
    if not most or norm is None or job.scaler.is_enabled() or math.isfinite(norm):
        job.scaler.step(job.optimizer)
        job.scaler.update()
        progress.skipped_in_a_row = 0
        return
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row > most:
        raise not_finite(job, f"the gradient of {progress.skipped_in_a_row} steps in a row")
    job.running.drop_step()
    for buffer, old in zip(_statistics(job.model), before, strict=True):
        buffer.copy_(old)
    job.run.say(
        f"step {progress.step}: the gradient is not finite, the step is skipped "
        f"({progress.skipped} so far)"
    )


def _statistics(model: nn.Module) -> list[Tensor]:
    """The buffers that one bad batch can spoil."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def _gradient_norm(job: Job) -> Tensor:
    """The norm of all gradients together, which are scaled down to `--clip-norm` if there is
    one.
    """
    if job.scaler.is_enabled():
        job.scaler.unscale_(job.optimizer)
    if job.config.clip_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.config.clip_norm)
    else:
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in job.model.parameters() if p.grad is not None]
        )
    whole: Tensor = job.strategy.whole(norm)
    return whole
