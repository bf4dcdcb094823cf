"""Keep the GPU busy with matrix products for some seconds."""

import time
from collections.abc import Iterator
from typing import Any

import torch


def measure(device: str, seconds: float) -> Iterator[tuple[str, Any]]:
    size = 8192 if device == "cuda" else 256
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = torch.randn(2, size, size, device=device).to(dtype).unbind()
    result, count = torch.empty_like(left), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            torch.mm(left, right, out=result)
        if device == "cuda":
            torch.cuda.synchronize()
        count += 20
    yield "products", count
