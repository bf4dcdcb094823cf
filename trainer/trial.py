"""A trial of the task before the first step: are its losses of the right form, and the same bits when computed again?"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer.batches import length, read_examples, training_batches
from trainer.buffers import Place, buffer_places, frozen_places, kept
from trainer.digest import value_digest
from trainer.errors import WrongUse
from trainer.losses import check_losses
from trainer.state import Job
from trainer.trial_validation import try_validation

_EXAMPLES_FROM_A_LOADER = 8  # each may be a film to decode


def try_task(job: Job) -> None:
    """Compute the next step's first losses, and under --deterministic compute them again; the job stays as it was.

    Raises:
        WrongUse: losses of another form, or a task that draws random numbers of its own: its bits cannot
            be had again.
        Exception: what the first validation would raise.
    """
    step = job.progress.step
    if step >= job.end_step:
        return
    micro = job.schedule.micros[0]
    in_memory = isinstance(job.train, TensorDataset)
    if not in_memory:
        micro = dataclasses.replace(micro, stop=min(micro.stop, micro.start + _EXAMPLES_FROM_A_LOADER))
    schedule = dataclasses.replace(job.schedule, micros=(micro,), total_steps=step + 1)
    (batch,) = training_batches(job.train, schedule, step, job.process.device, min(job.workers, 1))
    job.model.train()
    extra = copy.deepcopy({name: value for name, value in job.model.state_dict().items() if not isinstance(value, Tensor)})
    with _nothing_is_lost(job):
        moved = _moved_parameters(job, batch)
        first = _computed(job, batch, 0, micro.size, moved)
    if moved:
        job.reduction.also_moves(moved)
    if job.config.deterministic:
        if not in_memory:
            _read_again(job)
        _computed(job, batch, 1, micro.size, moved)  # in between, as in a training
        _compare(job, first, _computed(job, batch, 0, micro.size, moved))
    statistics = try_validation(job)
    if len(statistics) == 2:
        _compare(job, *statistics)
    if extra:
        job.model.load_state_dict(extra, strict=False)


def _moved_parameters(job: Job, batch: Any) -> list[Place]:
    """The frozen parameters that a forward moves (a mean teacher's); where none is frozen nothing is computed."""
    frozen = frozen_places(job.model)
    if not frozen:
        return []
    before = [(home[name]._version, home[name].clone()) for home, name in frozen]
    with kept([*buffer_places(job.model), *frozen]), job.process.moves_noted(job.loss_module) as lost:
        job.process.seed(job.config.seed, "trial", 0)
        job.loss_module(batch)
        if lost:
            raise WrongUse(
                f"task {type(job.task).__name__}: a forward moves {lost[0].removeprefix('model.')}, which is not trained, and "
                "--strategy fsdp would lose that: make it a buffer, or use --strategy ddp"
            )
        return [
            (home, name)
            for (home, name), (version, values) in zip(frozen, before, strict=True)
            if home[name]._version != version or not torch.equal(home[name], values)
        ]


@contextlib.contextmanager
def _nothing_is_lost(job: Job) -> Iterator[None]:
    """Refuse what the body's forward makes or counts up, and a checkpoint would leave out."""
    names, counts = set(job.model.state_dict()), _counts(job.model)
    yield
    task = f"task {type(job.task).__name__}"
    if made := [name for name in job.model.state_dict() if name not in names]:
        raise WrongUse(f"{task}: a forward makes the buffer {made[0]}, which a new model has not: register it in __init__")
    for name, count in _counts(job.model).items():
        if job.config.deterministic and count != counts.get(name, count):
            raise WrongUse(
                f"{task}: a forward changes {name} from {counts[name]} to {count}, which checkpoints leave out: make it a "
                "buffer, or give up the same bits with --fast"
            )


def _counts(model: nn.Module) -> dict[str, int]:
    """The whole numbers that the modules hold as plain attributes."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def _computed(job: Job, batch: Any, number: int, size: int, moved: list[Place]) -> dict[str, str]:
    """Digests of the losses and gradients of `batch` under the seed `number`; buffers and what is `moved` are put back."""
    before = {name: buffer.clone() for name, buffer in _unsaved(job.model).items()}
    job.process.seed(job.config.seed, "trial", number)
    with kept([*buffer_places(job.model), *moved]):
        losses_B = job.loss_module(batch)
        check_losses(job.task, losses_B, size)
        sum(loss_B.sum() for loss_B in losses_B.values() if loss_B.requires_grad).backward()
        for name, buffer in _unsaved(job.model).items():
            if name in before and not torch.equal(buffer, before[name]):
                raise WrongUse(
                    f"task {type(job.task).__name__}: a forward moves the buffer {name}, which checkpoints leave out: register "
                    "it with persistent=True"
                )
    gradients = {f"the gradient of {name}": p.grad for name, p in job.model.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        if gradient.is_sparse:
            raise WrongUse(f"task {type(job.task).__name__}: {name} is sparse, and cannot be exchanged: use sparse=False")
    digests = job.digests({f"the loss {name}": loss_B for name, loss_B in losses_B.items()} | gradients)
    job.model.zero_grad()
    return digests


def _unsaved(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint leaves out."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def _read_again(job: Job) -> None:
    indices = [0, length(job.train) - 1]
    *first, one, other = read_examples(job.train, job.config.seed, indices * 2, job.workers)
    for index, before, after in zip(indices, first, (one, other), strict=True):
        if value_digest(before) != value_digest(after):
            raise WrongUse(f"task {type(job.task).__name__}: training example {index} differs when it is read again: {_CURE}")


def _compare(job: Job, first: dict[str, str], second: dict[str, str]) -> None:
    for name, digest in first.items():
        if digest != second[name]:
            raise WrongUse(f"task {type(job.task).__name__}: {name} differs when the same batch is computed again: {_CURE}")


_CURE = (
    "it draws random numbers from a generator of its own, or keeps a state; draw from torch's global generator (in a dataset "
    "Python's and NumPy's are seeded too), or give up the same bits with --fast"
)
