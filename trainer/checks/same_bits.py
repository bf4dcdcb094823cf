"""Compare the values that two jobs compute: by their bytes if copies of them fit, else by digests.

A comparison of bytes is much faster than a digest, on a GPU and on a CPU.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.loop.digests import state_tensors
from trainer.loop.state import Job
from trainer.parallel.buffers import local
from trainer.records.digest import tensor_bytes, value_digest

# The rehearsal keeps the values of at most five steps. If each of them takes at most a sixth of the
# free memory, the last sixth stays free.
_SHARE_OF_GPU = 1 / 6
_MOST_HOST_BYTES = 2**29


class Bits(NamedTuple):
    """A copy of this rank's share of a tensor.

    Attributes:
        kind: The type and the shape.
        data: The bytes of the elements, in their order.
    """

    kind: str
    data: Tensor


def copies_fit(job: Job) -> bool:
    """Return whether the values of five steps fit on the device; all ranks must call this.

    The values are the gradients, and the state after a step.
    """
    device = job.world.device
    gradients = [p for p in job.state.model.parameters() if p.requires_grad]
    values = [*gradients, *(v for part in state_tensors(job) for v in part.values())]
    needed_bytes = sum(local(value).nbytes for value in values if isinstance(value, Tensor))
    most_bytes: float = _MOST_HOST_BYTES
    if device.type == "cuda":
        most_bytes = _SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0]
    return all(job.world.from_each(needed_bytes <= most_bytes))


def kept(job: Job, values: Mapping[str, Any], copies: bool) -> dict[str, Any]:
    """Return `copies` or digests of values, by name; all ranks must call this."""
    return {name: bits(value) for name, value in values.items()} if copies else job.digests(values)


def bits(value: Any) -> Bits | str:
    """Return a copy of a tensor, or the digest of another value."""
    if not isinstance(value, Tensor):
        return value_digest(value)
    share = local(value)
    return Bits(f"{share.dtype} {tuple(share.shape)}", tensor_bytes(share).clone())


def same(one: Any, other: Any) -> bool:
    """Return whether two results of `bits`, or two other values, are the same."""
    if isinstance(one, Bits) and isinstance(other, Bits):
        return one.kind == other.kind and torch.equal(one.data, other.data)
    return bool(one == other) if type(one) is type(other) else False
