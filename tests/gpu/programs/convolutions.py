"""Compute a convolution with little free memory: the same bits, a count or an error.

cuDNN keeps the algorithm that it has found for a shape, so each process has one limit.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from trainer.loop.out_of_memory import failed_allocations, memory_used_up
from trainer.records.digest import tensor_digest

_MIB = 2**20


def limit_memory(mib: float) -> None:
    """Let this process reserve `mib` MiB more than now on the GPU."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    fraction = (torch.cuda.memory_reserved() + mib * _MIB) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, fraction))


def measure(device: str, room_mib: float | None) -> Iterator[tuple[str, Any]]:
    """Yield ("TYPE PASS", outcome) with `room_mib` above the result's own size, or no limit."""
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        count = 32 if device == "cuda" else 1
        images = torch.randn(count, 128, 56, 56, device=device).to(dtype)
        kernels = torch.randn(128, 128, 3, 3, device=device).to(dtype)
        for backward in (False, True):
            if device == "cuda" and room_mib is not None:
                limit_memory(images.nbytes * (3 if backward else 1) / _MIB + 4 + room_mib)
            name = f"{str(dtype).removeprefix('torch.')} {'backward' if backward else 'forward'}"
            yield name, _outcome(images, kernels, backward)


def _outcome(images: torch.Tensor, kernels: torch.Tensor, backward: bool) -> dict[str, Any]:
    """Return the digest of the result and the failed allocations, or the error."""
    before = failed_allocations()
    images, kernels = (t.detach().requires_grad_(backward) for t in (images, kernels))
    try:
        result = F.conv2d(images, kernels, padding=1)
        if backward:
            result.backward(torch.ones_like(result))
            assert images.grad is not None and kernels.grad is not None
            digest = tensor_digest(images.grad) + tensor_digest(kernels.grad)
        else:
            digest = tensor_digest(result)
    except RuntimeError as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
        return {"raised": text, "recognized": memory_used_up(error) is not None}
    return {"digest": digest, "failed": failed_allocations() - before}
