"""The preflight check: check a task before the first step.

The losses must have the right form. Under --deterministic, the same computation must give the same
bits. The part "trial" of the seeds is the check's old name. Another name would change bits.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainbox.contract.errors import WrongUse
from trainer.data.batches import training_batches
from trainer.data.examples import read_twice
from trainer.loop.attribute_values import local
from trainer.loop.attributes import FAST, describe_change
from trainer.loop.losses import check_losses
from trainer.loop.out_of_memory import all_fit
from trainer.loop.preflight_validation import check_validation
from trainer.loop.state import Job
from trainer.loop.task_checks import collate_of
from trainer.parallel.buffers import Slot, buffer_slots, frozen_slots, kept
from trainer.records.digest import same_bits, value_digest

_READING_S = 0.5  # the time for reading examples twice
_EXAMPLES_FROM_A_LOADER = 8  # few, because reading may be slow, such as decoding a film


def preflight_check(job: Job) -> None:
    """Compute the first losses of the next step, and under --deterministic compute them again.

    The job is unchanged afterwards.

    Raises:
        WrongUse: The losses do not have the right form. Or the task draws random numbers from its
            own generator, so its bits cannot be repeated.
        OutOfMemory: The memory of some rank is used up.
        Exception: Any error of the first validation.
    """
    # Read one batch, and under --deterministic a second one. A loader gives only a few examples.
    step = job.state.progress.step
    if step >= job.end_step:
        return
    micro = job.schedule.micros[0]
    in_memory = isinstance(job.train, TensorDataset)
    if not in_memory:
        micro = dataclasses.replace(
            micro, stop=min(micro.stop, micro.start + _EXAMPLES_FROM_A_LOADER)
        )
    count = 2 if job.config.deterministic else 1
    schedule = dataclasses.replace(job.schedule, micros=(micro,), total_steps=step + count)
    with all_fit(job.strategy):
        batch, *others = training_batches(
            job.train, schedule, step, job.world.device, min(job.workers, 1), collate_of(job.task)
        )
    job.state.model.train()
    # Record the attributes and the extra state of the start. A large tensor is not restored, so it
    # must be recorded before this check changes it.
    job.attributes.changed()
    extra = copy.deepcopy(
        {
            name: value
            for name, value in job.state.model.state_dict().items()
            if not isinstance(value, Tensor)
        }
    )
    # Compute the batch, then validate a sample. Everything is restored at the end.
    with (
        job.attributes.preserved(),
        _weights_kept(job) as refuse_changed_weights,
        _no_new_buffer(job),
    ):
        with all_fit(job.strategy):
            with job.attributes.preserved():
                changed = _changed_parameters(job, batch)
            if changed:
                job.reduction.also_average(changed)

            def computed(batch: Any, number: int) -> dict[str, str]:
                return _computed(job, batch, number, micro.size, changed)

            if job.config.deterministic:
                _compute_again(job, computed, (batch, *others), refuse_changed_weights)
                if not in_memory:
                    _read_again(job)
            else:
                computed(batch, 0)
        statistics = check_validation(job)
        if len(statistics) == 2:
            _compare(job, *statistics)
    if extra:
        job.state.model.load_state_dict(extra, strict=False)


def _changed_parameters(job: Job, batch: Any) -> list[Slot]:
    """Return the frozen parameters that a forward changes, such as those of a mean teacher.

    If no parameter is frozen, nothing is computed.

    Raises:
        WrongUse: A frozen parameter changes under a strategy that would lose the change.
    """
    frozen = frozen_slots(job.state.model)
    if not frozen:
        return []
    before = [(home[name]._version, home[name].clone()) for home, name in frozen]
    with (
        kept([*buffer_slots(job.state.model), *frozen]),
        job.strategy.lost_writes(job.loss_module) as lost,
    ):
        job.world.seed(job.config.seed, "trial", 0)
        job.loss_module(batch)
        if lost:
            raise WrongUse(
                f"task {type(job.task).__name__}: a forward changes the parameter "
                f"{lost[0].removeprefix('model.')}, which is not trained, and --strategy fsdp "
                "would lose the change: make it a buffer, or use --strategy ddp"
            )
        return [
            (home, name)
            for (home, name), (version, values) in zip(frozen, before, strict=True)
            if home[name]._version != version or not torch.equal(home[name], values)
        ]


@contextlib.contextmanager
def _no_new_buffer(job: Job) -> Iterator[None]:
    """Raise WrongUse if the body adds an entry to the model's state dict."""
    names = set(job.state.model.state_dict())
    yield
    if new := [name for name in job.state.model.state_dict() if name not in names]:
        raise WrongUse(
            f"task {type(job.task).__name__}: a forward creates the buffer {new[0]}, so a resume "
            "could not restore it: register it in __init__"
        )


@contextlib.contextmanager
def _weights_kept(job: Job) -> Iterator[Callable[[], None]]:
    """Restore the trained parameters after the body.

    The value is a function that raises WrongUse if a forward has changed a trained parameter. The
    copies are on the CPU, because a GPU may not have enough memory for them.
    """
    trained = [
        (
            f"{path}.{name}".lstrip("."),
            owner._parameters,
            name,
            parameter,
            _on_cpu(parameter, copy=True),
        )
        for path, owner in job.state.model.named_modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]

    def refuse_changed() -> None:
        for path, home, name, parameter, values in trained:
            if home[name] is not parameter or not same_bits(_on_cpu(parameter), values):
                raise WrongUse(
                    f"task {type(job.task).__name__}: a forward sets the trained parameter {path} "
                    f"from the first examples that it gets: set it in build_model(), or {FAST}"
                )

    yield refuse_changed
    with torch.no_grad():
        for _path, home, name, parameter, values in trained:
            home[name] = parameter
            if not same_bits(_on_cpu(parameter), values):
                local(parameter).copy_(values)


def _on_cpu(tensor: Tensor, copy: bool = False) -> Tensor:
    """Return this rank's share of `tensor` on the CPU."""
    return local(tensor.detach()).to("cpu", copy=copy)


def _compute_again(
    job: Job,
    computed: Callable[[Any, int], dict[str, str]],
    batches: Sequence[Any],
    refuse_changed_weights: Callable[[], None],
) -> None:
    """Compute the first batch, another batch and the first batch again, and compare the results.

    The results are the digests and the plain attributes. An attribute may change if each forward
    sets it from its batch alone, such as activations that are kept for a figure. This is checked by
    computing the other batch once more with the attributes of the start.

    Raises:
        WrongUse: A digest differs, or a forward changes an attribute or a trained parameter.
    """
    # Compute the batches 0, 1 and 0.
    attributes = job.attributes
    start, restore = attributes.values(), attributes.snapshot()
    found = []
    for number in (0, 1, 0):
        found.append((computed(batches[number], number), attributes.values()))
        refuse_changed_weights()
    # If an attribute changes, compute batch 1 again from the attributes of the start. If a forward
    # is collective, all ranks compute it.
    changing = {name for _, values in found for name in attributes.differing(start, values)}
    pairs = [(found[0], found[2])]
    if any(job.world.from_each(bool(changing))) if job.strategy.forward_is_collective else changing:
        restore()
        not_restored = attributes.differing(start, attributes.values())
        for name, pair in not_restored.items():
            raise WrongUse(
                f"task {type(job.task).__name__}: a forward changes {describe_change(name, pair)}"
            )
        pairs.append((found[1], (computed(batches[1], 1), attributes.values())))
    # The same batch must leave the same attributes and give the same digests.
    for (_, values), (_, again) in pairs:
        for name, pair in attributes.differing(values, again).items():
            since_start = attributes.differing(start, values).get(name, pair)
            raise WrongUse(
                f"task {type(job.task).__name__}: a forward changes "
                f"{describe_change(name, since_start)}"
            )
    for (digests, _), (again_digests, _) in pairs:
        _compare(job, digests, again_digests)
    attributes.recomputed |= changing


def _computed(job: Job, batch: Any, number: int, size: int, changed: list[Slot]) -> dict[str, str]:
    """Return digests of the losses and gradients of `batch` under the seed `number`.

    `size` is the number of examples. The buffers and the `changed` parameters are restored.

    Raises:
        WrongUse: The losses do not have the right form, a gradient is sparse, or a buffer that
            checkpoints leave out changes.
    """
    before = {name: buffer.clone() for name, buffer in _unsaved(job.state.model).items()}
    job.world.seed(job.config.seed, "trial", number)
    with kept([*buffer_slots(job.state.model), *changed]):
        losses_B = job.loss_module(batch)
        check_losses(job.task, losses_B, size)
        sum(loss_B.sum() for loss_B in losses_B.values() if loss_B.requires_grad).backward()
        for name, buffer in _unsaved(job.state.model).items():
            if name in before and not torch.equal(buffer, before[name]):
                raise WrongUse(
                    f"task {type(job.task).__name__}: a forward changes the buffer {name}, "
                    "which checkpoints leave out: register it with persistent=True"
                )
    gradients = {
        f"the gradient of {name}": p.grad
        for name, p in job.state.model.named_parameters()
        if p.grad is not None
    }
    for name, gradient in gradients.items():
        if gradient.is_sparse:
            raise WrongUse(
                f"task {type(job.task).__name__}: {name} is sparse and cannot be exchanged "
                "between processes: use sparse=False"
            )
    digests = job.digests(
        {f"the loss {name}": loss_B for name, loss_B in losses_B.items()} | gradients
    )
    job.state.model.zero_grad()
    return digests


def _unsaved(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint leaves out."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def _read_again(job: Job) -> None:
    """Read training examples twice, and raise WrongUse if one differs."""
    digests: dict[int, str] = {}
    differing = []
    for index, example in read_twice(
        job.train, job.config.seed, job.workers, _READING_S, collate_of(job.task)
    ):
        if digests.setdefault(index, digest := value_digest(example)) != digest:
            differing.append(index)
    # Raise after the loop: a loader worker that is abandoned during its work prints a traceback.
    if differing:
        raise WrongUse(
            f"task {type(job.task).__name__}: training example {min(differing)} differs "
            f"when it is read again: {_REMEDY}"
        )


def _compare(job: Job, first: dict[str, str], second: dict[str, str]) -> None:
    """Raise WrongUse if a digest differs."""
    for name, digest in first.items():
        if digest != second[name]:
            raise WrongUse(
                f"task {type(job.task).__name__}: {name} differs when the same batch is "
                f"computed again: {_REMEDY}"
            )


_REMEDY = (
    "draw random numbers only from the global generators of torch, NumPy and Python and keep no "
    f"state between calls, or {FAST}"
)
