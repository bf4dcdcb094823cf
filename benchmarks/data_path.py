"""Measure batches of 28x28 pictures on one core: in memory, and one example at a time."""

import statistics
import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer.data.batches import training_batches
from trainer.data.schedule import Schedule, micro_batches
from trainer.tasks.mnist import Mnist

TURNS = 7
BATCH_SIZE = 128
EXAMPLES = 60_000


def measure() -> Iterator[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randint(0, 256, (EXAMPLES, 1, 28, 28), dtype=torch.uint8, generator=generator),
        torch.randint(0, 10, (EXAMPLES,), generator=generator),
    )
    gathered, prepared, loader = [], [], []
    for _ in range(TURNS):
        gathered.append(_in_memory(dataset, prepare=False))
        prepared.append(_in_memory(dataset, prepare=True))
        loader.append(_one_by_one(dataset))
    torch.set_num_threads(threads)
    yield "| path, batch 128, one thread | examples/s |"
    yield "|---|---|"
    yield f"| in memory, gathered by batches | {statistics.median(gathered):,.0f} |"
    yield f"| the same, then to float and normalised | {statistics.median(prepared):,.0f} |"
    yield f"| DataLoader, one example at a time, no workers | {statistics.median(loader):,.0f} |"


def _in_memory(dataset: TensorDataset, prepare: bool) -> float:
    task, steps = Mnist(), EXAMPLES // BATCH_SIZE
    schedule = Schedule(0, EXAMPLES, BATCH_SIZE, steps, micro_batches(BATCH_SIZE, 1, 1, range(1)))
    begin = time.perf_counter()
    for batch in training_batches(dataset, schedule, 0, torch.device("cpu"), 0):
        if prepare:
            task.prepare(batch, training=True)
    return steps * BATCH_SIZE / (time.perf_counter() - begin)


def _one_by_one(dataset: TensorDataset) -> float:
    task, steps = Mnist(), 100
    begin = time.perf_counter()
    for step, batch in enumerate(DataLoader(dataset, BATCH_SIZE, shuffle=True)):
        task.prepare(batch, training=True)
        if step == steps:
            break
    return steps * BATCH_SIZE / (time.perf_counter() - begin)
