"""Measure what other figures depend on: launches, hashes, waits for the disk, and attention."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from tests.gpu.programs.by_hand import slowest_kernels

_MIB = 2**20


def measure(device: str, folder: str) -> Iterator[tuple[str, Any]]:
    """Yield µs of a launch, MiB/s of SHA-256 and of a file, and the kernels of attention."""
    tensor, launches = torch.zeros(1, device=device), 10_000
    seconds = _seconds(lambda: [tensor.add_(1) for _ in range(launches)])
    yield "µs of a launch", seconds / launches * 1e6
    data = bytes(256 * _MIB)
    yield "MiB/s of SHA-256", 256 / _seconds(lambda: hashlib.sha256(data))
    path = Path(folder, "calibration")
    yield "MiB/s of a file", 256 / _seconds(lambda: path.write_bytes(data))
    descriptor = os.open(path, os.O_RDONLY)
    yield "s of fsync of 256 MiB", _seconds(lambda: os.fsync(descriptor))
    os.close(descriptor)
    path.unlink()
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        yield f"attention, deterministic {deterministic}", slowest_kernels(device, _attend(device))


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _attend(device: str) -> Callable[[], None]:
    """Return a forward and a backward of the attention of `text`, smaller on a CPU."""
    shape = (32, 12, 1024, 64) if device == "cuda" else (1, 2, 16, 8)
    query, key, value = torch.randn(3, *shape, device=device, dtype=torch.bfloat16).unbind()
    query.requires_grad_()

    def step() -> None:
        F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    return step
