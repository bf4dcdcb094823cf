"""Compute a convolution with less and less free memory: the same bits, a count or an error."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from trainer.loop.out_of_memory import failed_allocations, memory_used_up
from trainer.records.digest import tensor_digest

_MIB = 2**20
ROOM_MIB = (2048, 512, 256, 128, 64, 32, 16, 8, 4, 2, 0)


def limit_memory(mib: float | None) -> None:
    """Let this process reserve `mib` MiB more than now on the GPU, or as much as it has if None."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    own = torch.cuda.memory_reserved()
    fraction = 1.0 if mib is None else min(1.0, (own + mib * _MIB) / total)
    torch.cuda.set_per_process_memory_fraction(fraction)


def measure(device: str) -> Iterator[tuple[str, Any]]:
    """Yield ("TYPE PASS, ROOM MiB", outcome) for each free memory above the result's own size."""
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(0)
    rooms = ROOM_MIB if device == "cuda" else (0,)
    for dtype in (torch.float32, torch.bfloat16):
        count = 32 if device == "cuda" else 1
        images = torch.randn(count, 128, 56, 56, device=device).to(dtype)
        kernels = torch.randn(128, 128, 3, 3, device=device).to(dtype)
        for backward in (False, True):
            expected = _outcome(images, kernels, backward)
            size_mib = images.nbytes * (3 if backward else 1) / _MIB + 4
            name = f"{str(dtype).removeprefix('torch.')} {'backward' if backward else 'forward'}"
            yield f"{name}, no limit", expected
            for room in rooms:
                if device == "cuda":
                    limit_memory(size_mib + room)
                yield f"{name}, {room} MiB", _outcome(images, kernels, backward, expected)
                if device == "cuda":
                    limit_memory(None)


def _outcome(
    images: torch.Tensor, kernels: torch.Tensor, backward: bool, expected: str | None = None
) -> str:
    """Return the digest of the result, or how it compares with the `expected` one."""
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
        known = "recognized" if memory_used_up(error) else "NOT RECOGNIZED"
        return f"{known}: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
    if expected is None:
        return digest[:16]
    failed = failed_allocations() - before
    if digest[:16] == expected:
        return f"same bits, {failed} failed allocations"
    return f"other bits, {failed} failed allocations" if failed else "OTHER BITS WITHOUT A SIGN"
