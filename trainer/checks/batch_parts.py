"""Compare the losses of a batch with the losses of its parts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainbox.tensor_trees import copied, take, tensors_in
from trainer.checks.hidden_state import on_any_rank
from trainer.loop.losses import autocast
from trainer.loop.state import Job

# The largest difference that rounding explains, relative to the mean of a loss. Kernels may add in
# another order for another batch size.
_ROUNDING, _ROUNDING_HALF = 1e-2, 1e-1
_FEWEST = 4  # examples

Losses = dict[str, Tensor]


@torch.no_grad()
def batch_dependence(job: Job, batches: Sequence[Any]) -> str | None:
    """Return a note if the losses of the examples in a batch depend on the other examples.

    The first of `batches` is computed in evaluation mode: as a whole, in halves, and its first two
    examples alone. Losses that are random, and batches of less than four examples, are not
    compared. All ranks must call this, because the task may exchange something in losses().
    """
    size = _size(batches)
    if min(job.world.from_each(size)) < _FEWEST or job.strategy.forward_is_collective:
        return None
    whole = torch.arange(size, device=tensors_in(batches[0])[0].device)
    with job.evaluating() as put_back:

        def losses(indices: Tensor, seed: int) -> Losses:
            put_back()
            job.world.seed(seed)
            batch = take(copied(batches[0]), indices)
            with autocast(job.world.device.type, job.autocast_dtype):
                found = job.task.losses(job.model, job.task.prepare(batch, training=False))
            return {name: loss_B.float().reshape(len(indices)) for name, loss_B in found.items()}

        expected = _computed(lambda: losses(whole, 0))
        again = _computed(lambda: losses(whole, 1))
        if any(job.world.from_each(not _equal(expected, again))):
            return None
        assert expected is not None
        parts = (*whole.split(-(-size // 2)), whole[:1], whole[1:2])
        found = [
            (part, computed)
            for part in parts
            if (computed := _computed(lambda part=part: losses(part, 0))) is not None  # type: ignore[misc]
        ]
    rounding = _ROUNDING if job.autocast_dtype is None else _ROUNDING_HALF
    return on_any_rank(job.world, _difference(expected, found, rounding))


def _size(batches: Sequence[Any]) -> int:
    """Return the number of examples in the first batch, or 0 if its tensors have no such number."""
    sizes = {
        len(tensor) if tensor.ndim else 0 for batch in batches[:1] for tensor in tensors_in(batch)
    }
    return sizes.pop() if len(sizes) == 1 else 0  # for example, a packed sequence has no size


def _computed(losses: Callable[[], Losses]) -> Losses | None:
    """Return `losses()`, or None if they raise an error, as a small part of a batch may."""
    try:
        return losses()
    except Exception:  # noqa: BLE001 - a part that cannot be computed shows no difference
        return None


def _equal(one: Losses | None, other: Losses | None) -> bool:
    return (
        one is not None
        and other is not None
        and all(torch.equal(loss_B, other[name]) for name, loss_B in one.items())
    )


def _difference(
    expected: Losses, found: Sequence[tuple[Tensor, Losses]], rounding: float
) -> str | None:
    """Return the note for the first loss that differs by more than `rounding`, or None."""
    for name, loss_B in expected.items():
        mean = float(loss_B.abs().mean())
        apart = [float((part[name] - loss_B[indices]).abs().max()) for indices, part in found]
        if (largest := max(apart, default=0.0)) > rounding * max(mean, 1e-6):
            return (
                f"the loss {name} of an example depends on the other examples of its batch: in a "
                f"half of the batch, or alone, it differs by up to {largest:.2g} (its mean is "
                f"{mean:.2g}). Shards, micro-batches and validation batches are such parts: if "
                "this is a mistake, use reduction='none', with an output and targets of the same "
                "shape"
            )
    return None
