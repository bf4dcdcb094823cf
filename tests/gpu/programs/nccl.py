"""Yield the version of NCCL that this process has loaded."""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch


def measure(device: str) -> Iterator[tuple[str, Any]]:
    """Ask the library itself, because a preloaded one replaces the one of torch."""
    torch.cuda.nccl.version()  # loads the library
    number = ctypes.c_int()
    try:
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(number))
    except AttributeError:  # torch contains NCCL
        yield "version", ".".join(map(str, torch.cuda.nccl.version()))
        return
    yield "version", f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
