"""Measure how long a checkpoint of 300 MB pauses the training."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from trainbox.tensor_trees import tensors_in
from trainer.records.checkpoint import RunCheckpoints

TURNS = 11


def measure() -> Iterator[str]:
    model = torch.nn.Sequential(*(torch.nn.Linear(1120, 1120) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.ones(64, 1120)
    _train(model, optimizer, inputs)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    tensors = [tensor for tensor in tensors_in(state) if tensor.ndim]
    buffers = [torch.zeros_like(tensor) for tensor in tensors]
    plain, copied, ours, durable = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = RunCheckpoints(Path(folder) / "checkpoints", 1, True, print)
        checkpoints.prepare(state)
        for turn in range(TURNS):
            _train(model, optimizer, inputs)
            copied.append(_copy(tensors, buffers))
            _train(model, optimizer, inputs)
            begin = time.perf_counter()
            checkpoints.save(turn + 1, state, {}, None)
            ours.append(time.perf_counter() - begin)
            checkpoints.wait()
            durable.append(time.perf_counter() - begin)
            os.sync()  # the disk is idle at a save, because a training saves every few minutes
        for _turn in range(TURNS):
            _train(model, optimizer, inputs)
            plain.append(_plain(state, Path(folder) / "plain.pt"))
            os.sync()
        size_mb = (Path(folder) / "plain.pt").stat().st_size / 1e6
    yield (
        f"| {size_mb:.0f} MB | pause of the training, median ms | longest ms | durable "
        "after, median s |"
    )
    yield "|---|---|---|---|"
    yield (
        f"| torch.save and fsync | {_ms(plain):.1f} | {max(plain) * 1e3:.1f} | "
        f"{statistics.median(plain):.2f} |"
    )
    yield (
        f"| copying the bytes once in memory | {_ms(copied):.1f} | "
        f"{max(copied) * 1e3:.1f} | never |"
    )
    yield (
        f"| Trainbox | {_ms(ours):.1f} | {max(ours) * 1e3:.1f} | {statistics.median(durable):.2f} |"
    )


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    """Train for three steps, as before a save."""
    for _ in range(3):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _plain(state: Mapping[str, object], path: Path) -> float:
    begin = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begin


@torch.no_grad()
def _copy(tensors: list[torch.Tensor], buffers: list[torch.Tensor]) -> float:
    """Return the seconds of a copy in memory, the least that a save between two steps can take."""
    begin = time.perf_counter()
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer.copy_(tensor)
    return time.perf_counter() - begin


def _ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3
