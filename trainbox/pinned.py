"""Buffers in pinned memory, to which a GPU can copy at full speed."""

import weakref
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

_ALIGNED = 512  # bytes; what CUDA aligns its own allocations to
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs


def pinned_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros like each of `tensors` on the CPU, in one pinned block.

    torch's own pinned memory (`pin_memory=True`) rounds the size of each tensor up to a power of
    two, so that a checkpoint would take up to twice its size. The block is released with its last
    tensor.

    Raises:
        MemoryError: CUDA cannot pin the block.
    """
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-_span(tensor) * tensor.element_size() // _ALIGNED) * _ALIGNED
    block = numpy.zeros(max(size, 1), dtype=numpy.uint8)
    address = block.ctypes.data
    cudart = torch.cuda.cudart()
    # An enumeration of CUDA is not equal to a number, so convert it, as torch does.
    if (code := int(cudart.cudaHostRegister(address, block.nbytes, _PORTABLE))) != 0:
        raise MemoryError(f"cannot pin {block.nbytes >> 20} MiB for checkpoints, CUDA error {code}")
    # The tensors keep the block. Its finalizer runs before its memory is freed.
    weakref.finalize(block, cudart.cudaHostUnregister, address).atexit = False
    # Each tensor has a storage of its own, as torch.save writes whole storages.
    return [
        torch.frombuffer(block, dtype=tensor.dtype, count=_span(tensor), offset=offset).as_strided(
            tensor.shape, tensor.stride()
        )
        if tensor.numel()
        else torch.zeros_like(tensor, device="cpu")
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


def _span(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last one in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
