"""Measure a step of V shards in one tree against torch's DistributedDataParallel, in turns.

`python -m benchmarks shards` runs this file again under torchrun, for one and for two processes.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.jobs import median_and_middle
from trainer.data.schedule import micro_batches
from trainer.parallel.exchange import Reduction
from trainer.parallel.world import World
from trainer.tasks.mnist import Mnist

TURNS = 16
STEPS = 4  # a turn
BATCH_SIZE = 128


def measure() -> Iterator[str]:
    yield "| processes of one thread | step | ms | against plain (median of turns) | middle half |"
    yield "|---|---|---|---|---|"
    for processes in (1, 2):
        ranks = ["--standalone", f"--nproc-per-node={processes}", "-m", "--", "benchmarks.shards"]
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "trainer.programs.ranks.torchrun", *ranks],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            text=True,
        )
        plain, *others = json.loads(ended.stdout).items()
        yield f"| {processes} | {plain[0]} | {statistics.median(plain[1]) * 1e3:.1f} | 1 | |"
        for name, seconds in others:
            ratios = [ours / theirs for ours, theirs in zip(seconds, plain[1], strict=True)]
            yield (
                f"| {processes} | {name} | {statistics.median(seconds) * 1e3:.1f} | "
                f"{median_and_middle(ratios)} |"
            )


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Mnist().build_model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)


def _plain(world: World, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    model, optimizer = _model()
    wrapped = (
        nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if world.world_size > 1
        else model
    )
    own = world.owned(BATCH_SIZE)

    def step() -> None:
        F.cross_entropy(
            wrapped(inputs[own.start : own.stop]), labels[own.start : own.stop]
        ).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _in_shards(
    world: World, inputs: torch.Tensor, labels: torch.Tensor, shards: int
) -> Callable[[], None]:
    model, optimizer = _model()
    reduction = Reduction(world, shards, 1, model, list(model.parameters()))
    micros = micro_batches(BATCH_SIZE, shards, 1, world.owned(shards))
    weights_B = [torch.full((micro.size,), 1 / BATCH_SIZE) for micro in micros]

    def step() -> None:
        for micro, weight_B in zip(micros, weights_B, strict=True):
            with reduction.of(micro):
                losses_B = F.cross_entropy(
                    model(inputs[micro.start : micro.stop]),
                    labels[micro.start : micro.stop],
                    reduction="none",
                )
                losses_B.backward(weight_B)
        reduction.finish()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _seconds(step: Callable[[], None], world: World) -> float:
    world.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    world.barrier()
    return (time.perf_counter() - begin) / STEPS


def _run() -> None:
    world = World.start("cpu")
    generator = torch.Generator().manual_seed(0)
    inputs, labels = (
        torch.randn(BATCH_SIZE, 1, 28, 28, generator=generator),
        torch.randint(0, 10, (BATCH_SIZE,)),
    )
    counts = [
        world.world_size * factor for factor in ((1, 2, 4) if world.world_size > 1 else (2, 4, 8))
    ]
    steps = {
        "DistributedDataParallel" if world.world_size > 1 else "the whole batch at once": _plain(
            world, inputs, labels
        )
    }
    steps |= {f"V = {shards}": _in_shards(world, inputs, labels, shards) for shards in counts}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(TURNS + 1):
        for name, step in steps.items():
            seconds = _seconds(step, world)
            if turn:  # the first turn is a warm-up
                times[name].append(seconds)
    if world.is_first:
        print(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    _run()
