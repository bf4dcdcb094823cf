"""Buffers in pinned memory, to which a GPU can copy at full speed.

Some machines, such as WSL2, pin little memory or none. The buffers are pageable there, which is
printed once.
"""

import functools
import os
import weakref
from collections.abc import Callable, Sequence

import numpy
import torch
from torch import Tensor

from trainbox.processes.streams import message

_ALIGNED = 512  # bytes; what CUDA aligns its own allocations to
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs
# CUDA's codes where memory cannot be pinned: invalid value, out of memory, not supported.
_CANNOT_PIN = {1, 2, 801}


def pinned_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros like each of `tensors` on the CPU, in one pinned block.

    torch's own pinned memory (`pin_memory=True`) rounds the size of each tensor up to a power of
    two, so that a checkpoint would take up to twice its size. The block is released with its last
    tensor. Where CUDA cannot pin the block, it is pageable.
    """
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-_span(tensor) * tensor.element_size() // _ALIGNED) * _ALIGNED
    block = numpy.zeros(max(size, 1), dtype=numpy.uint8)
    address = block.ctypes.data
    cudart = torch.cuda.cudart()
    # An enumeration of CUDA is not equal to a number, so convert it, as torch does.
    if (code := int(cudart.cudaHostRegister(address, block.nbytes, _PORTABLE))) == 0:
        # The tensors keep the block. Its finalizer runs before its memory is freed.
        weakref.finalize(block, cudart.cudaHostUnregister, address).atexit = False
    else:
        # CUDA keeps the error until someone asks for it, as torch does after each kernel. So this
        # kernel raises the error instead of one of the training.
        try:
            torch.ones(1, device=tensors[0].device)
        except torch.AcceleratorError:
            if code not in _CANNOT_PIN:
                raise
        _report_pageable(code)
    # Each tensor has a storage of its own, as torch.save writes whole storages.
    return [
        torch.frombuffer(block, dtype=tensor.dtype, count=_span(tensor), offset=offset).as_strided(
            tensor.shape, tensor.stride()
        )
        if tensor.numel()
        else torch.zeros_like(tensor, device="cpu")
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


def pinned_if_possible(allocate: Callable[[bool], Tensor]) -> Tensor:
    """Return `allocate(True)`, which uses torch's pinned memory.

    Where CUDA cannot pin it, return `allocate(False)`.
    """
    try:
        return allocate(True)
    except torch.AcceleratorError as error:
        code = getattr(error, "error_code", None)
        if code not in _CANNOT_PIN:
            raise
        _report_pageable(code)
        return allocate(False)


@functools.cache  # one line for each error
def _report_pageable(code: int) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        reason = f"CUDA cannot pin memory on this machine (CUDA error {code}), as on WSL2"
        message(f"{reason}: copies between the host and the GPU are slower")


def _span(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last one in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
