"""Measure the rounding of products, convolutions and RNNs in float32 with and without TF32."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gpu.program import tried
from trainer.loop.arithmetic import set_tf32


def measure(device: str) -> Iterator[tuple[str, Any]]:
    """Yield the largest error of each operation, as a share of the largest result."""
    if device == "cuda":
        yield "capability", torch.cuda.get_device_capability()
    torch.manual_seed(0)
    left, right = torch.randn(2, 512, 512, device=device).unbind()
    images, kernels = torch.randn(8, 64, 32, 32), torch.randn(64, 64, 3, 3)
    images, kernels = images.to(device), kernels.to(device)
    lstm = nn.LSTM(128, 128, batch_first=True).to(device)
    series = torch.randn(8, 32, 128, device=device)
    operations: dict[str, Callable[[torch.dtype], Tensor]] = {
        "product": lambda t: left.to(t) @ right.to(t),
        "convolution": lambda t: F.conv2d(images.to(t), kernels.to(t), padding=1),
        "lstm": lambda t: lstm.to(t)(series.to(t))[0],
    }
    with torch.no_grad():
        exact = {name: compute(torch.float64) for name, compute in operations.items()}
        lstm.float()
        for name, allowed in (("fp32", False), ("tf32", True)):
            set_tf32(allowed)
            yield f"{name} switches", tried(_switches)
            for operation, compute in operations.items():
                error = (compute(torch.float32).double() - exact[operation]).abs().max()
                yield f"{name} {operation}", float(error / exact[operation].abs().max())


def _switches() -> dict[str, Any]:
    """Return all getters of TF32; torch raises an error if some of them disagree."""
    with torch.backends.cudnn.flags(enabled=True):
        pass
    return {
        "matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "matmul.fp32_precision": getattr(torch.backends.cuda.matmul, "fp32_precision", None),
        "precision": torch.get_float32_matmul_precision(),
    }
