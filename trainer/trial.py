"""A trial of the task before the first step: are its losses of the right form, and the same bits when computed again?"""

import dataclasses
from typing import Any

import torch

from trainer.batches import SeededExamples, length, training_batches
from trainer.digest import tensor_digests, value_digest
from trainer.errors import WrongUse
from trainer.fit import Job
from trainer.losses import check_losses

_EXAMPLES_FROM_A_LOADER = 8  # each may be a film to decode


def try_task(job: Job) -> None:
    """Compute the next step's first losses, and under --deterministic compute them again; the job stays as it was.

    Raises:
        WrongUse: losses of another form, or a task that draws random numbers of its own: its bits cannot be had again.
    """
    step = job.progress.step
    if step >= job.end_step:
        return
    micro = job.schedule.micros[0]
    in_memory = isinstance(job.train, torch.utils.data.TensorDataset)
    if not in_memory:
        micro = dataclasses.replace(micro, stop=min(micro.stop, micro.start + _EXAMPLES_FROM_A_LOADER))
    schedule = dataclasses.replace(job.schedule, micros=(micro,), total_steps=step + 1)
    (batch,) = training_batches(job.train, schedule, step, job.process.device, 0)
    before = {name: buffer.clone() for name, buffer in job.model.named_buffers()}
    job.model.train()
    first = _computed(job, batch, 0, micro.size)
    if job.config.deterministic:
        if not in_memory:
            _read_again(job)
        _computed(job, batch, 1, micro.size)  # in between, as in a training
        _compare(job, first, _computed(job, batch, 0, micro.size))
    _restore(job, before)


def _computed(job: Job, batch: Any, number: int, size: int) -> dict[str, str]:
    """Digests of the losses and gradients of `batch` under the seed `number`."""
    before = {name: buffer.clone() for name, buffer in job.model.named_buffers()}
    job.process.seed(job.config.seed, "trial", number)
    losses_B = job.loss_module(batch)
    check_losses(job.task, losses_B, size)
    sum(loss_B.sum() for loss_B in losses_B.values()).backward()
    gradients = {f"the gradient of {name}": p.grad for name, p in job.model.named_parameters() if p.grad is not None}
    digests = tensor_digests({f"the loss {name}": loss_B for name, loss_B in losses_B.items()} | gradients)
    _restore(job, before)
    return digests


def _restore(job: Job, buffers: dict[str, torch.Tensor]) -> None:
    job.optimizer.zero_grad()
    job.model.zero_grad()
    for name, buffer in job.model.named_buffers():
        buffer.copy_(buffers[name])


def _read_again(job: Job) -> None:
    examples = SeededExamples(job.train, job.config.seed)
    for index in {0, length(job.train) - 1}:
        if value_digest(examples[0, index]) != value_digest(examples[0, index]):
            raise WrongUse(f"task {type(job.task).__name__}: training example {index} differs when it is read again: {_CURE}")


def _compare(job: Job, first: dict[str, str], second: dict[str, str]) -> None:
    for name, digest in first.items():
        if digest != second[name]:
            raise WrongUse(f"task {type(job.task).__name__}: {name} differs when the same batch is computed again: {_CURE}")


_CURE = (
    "it draws random numbers from a generator of its own, or keeps a state; draw from torch's global generator (in a dataset "
    "Python's and NumPy's are seeded too), or give up the same bits with --fast"
)
