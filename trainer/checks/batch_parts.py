"""Compare the losses of a batch with those of its parts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainbox.contract.errors import Failure
from trainbox.nested import copied, take, tensors_in
from trainer.loop.losses import autocast
from trainer.loop.out_of_memory import memory_used_up
from trainer.loop.state import Job

# The largest difference that rounding explains, relative to the mean size of a loss. Kernels may
# add in another order for another batch size.
_ROUNDING, _ROUNDING_HALF = 1e-2, 1e-1


@torch.no_grad()
def batch_dependence(job: Job, batches: Sequence[Any]) -> str | None:
    """Return a note if the losses of the examples in a batch depend on the other examples.

    The first of `batches`, of at least four examples, is computed in evaluation mode: as a whole,
    in halves, and its first two examples alone. A task whose losses are random is not compared.
    """
    if not batches or job.strategy.forward_is_collective:
        return None
    tensors = tensors_in(batches[0])
    size = len(tensors[0]) if tensors and tensors[0].ndim else 0
    if size < 4 or any(tensor.ndim == 0 or len(tensor) != size for tensor in tensors):
        return None  # such as a packed sequence
    whole = torch.arange(size, device=tensors[0].device)
    with job.evaluating() as put_back:

        def losses(indices: Tensor, seed: int) -> dict[str, Tensor]:
            put_back()
            job.world.seed(seed)
            batch = take(copied(batches[0]), indices)
            with autocast(job.world.device.type, job.autocast_dtype):
                found = job.task.losses(job.model, job.task.prepare(batch, training=False))
            return {name: loss_B.float() for name, loss_B in found.items()}

        # A part that cannot be computed alone shows no difference.
        try:
            expected, again = losses(whole, 0), losses(whole, 1)
            if any(not torch.equal(loss_B, again[n]) for n, loss_B in expected.items()):
                return None
            parts = (*whole.split(-(-size // 2)), whole[:1], whole[1:2])
            found = [(indices, losses(indices, 0)) for indices in parts]
        except Exception as error:
            if isinstance(error, Failure) or memory_used_up(error) is not None:
                raise
            return None
    for name, loss_B in expected.items():
        scale = float(loss_B.abs().mean())
        largest = max(float((part[name] - loss_B[indices]).abs().max()) for indices, part in found)
        rounding = _ROUNDING if job.autocast_dtype is None else _ROUNDING_HALF
        if largest > rounding * max(scale, 1e-6):
            return (
                f"the loss {name} of an example depends on the other examples of its batch: in a "
                f"half of the batch, or alone, it differs by up to {largest:.2g} (its mean is "
                f"{scale:.2g}). Shards, micro-batches and validation batches are such parts"
            )
    return None
