"""Update weights by `weight_update` and by torch's own step; compare the bits and the times."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from tests.gpu.program import tried
from trainer.loop.weight_update import weight_update
from trainer.records.digest import value_digest

_STEPS = 20  # of a turn


def measure(device: str, sizes: dict[str, int], turns: int) -> Iterator[tuple[str, Any]]:
    """Yield for each number of parameters the digests, and the median µs of an update."""
    for name, count in sizes.items():
        yield name, tried(lambda count=count: _compared(device, count, turns))


def _compared(device: str, count: int, turns: int) -> dict[str, Any]:
    ours, theirs = _optimizer(device, count), _optimizer(device, count)
    scaler = torch.amp.GradScaler(device, enabled=False)
    update = weight_update(ours, scaler)
    seconds: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(turns):
        seconds["ours"].append(_seconds(device, update))
        seconds["torch"].append(_seconds(device, theirs.step))
    return {
        "same_bits": value_digest(_tensors(ours)) == value_digest(_tensors(theirs)),
        **{name: 1e6 * statistics.median(values) / _STEPS for name, values in seconds.items()},
    }


def _optimizer(device: str, count: int) -> AdamW:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(64, 64, generator=generator)) for _ in range(count)]
    parameters = [nn.Parameter(parameter.detach().to(device)) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.randn(64, 64, generator=generator).to(device)
    return AdamW(parameters, lr=1e-3, fused=True)


def _seconds(device: str, update: Callable[[], object]) -> float:
    """Return the time of the CPU for some updates, which the GPU may compute later."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_STEPS):
        update()
    return time.perf_counter() - begin


def _tensors(optimizer: AdamW) -> dict[str, Any]:
    parameters = optimizer.param_groups[0]["params"]
    return {
        f"{index} {name}": value
        for index, parameter in enumerate(parameters)
        for name, value in {"weights": parameter.detach(), **optimizer.state[parameter]}.items()
    }
