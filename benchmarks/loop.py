"""Training steps: our loop against one written by hand over the same tensors, in turns."""

import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainer import session
from trainer.config import Config
from trainer.distributed import Process
from trainer.fit import fit
from trainer.run import RunDirectory
from trainer.stopping import StopRequest
from trainer.tasks.mnist import Mnist

TURNS = 9
BATCH_SIZE = 128


@dataclass(frozen=True)
class RandomMnist(Mnist):
    """MNIST's CNN on random pictures: the speed is the same, and nothing is downloaded."""

    examples: int = 12_800

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (self.examples, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return TensorDataset(images, torch.randint(0, 10, (self.examples,), generator=generator))

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return TensorDataset(*(tensor[:1] for tensor in self.train_dataset(data_dir).tensors))


@dataclass(frozen=True)
class Mlp(RandomMnist):
    """A small perceptron, of the size that semi-supervised VAEs of MNIST have."""

    hidden: int = 512

    def build_model(self) -> nn.Module:
        wide = self.hidden
        layers = [nn.Linear(784, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 10)]
        return nn.Sequential(nn.Flatten(), *layers)


def measure() -> Iterator[str]:
    yield "| model, batch 128 | by hand, samples/s | Trainbox, samples/s | ratio (median of turns) | spread |"
    yield "|---|---|---|---|---|"
    for task, steps in ((Mlp(), 800), (RandomMnist(), 40)):
        ours, by_hand, ratios = [], [], []
        for turn in range(TURNS + 1):
            pair = (
                [_by_hand(task, steps), _ours(task, steps)] if turn % 2 else [_ours(task, steps), _by_hand(task, steps)][::-1]
            )
            if turn:  # the first warms up
                by_hand.append(pair[0])
                ours.append(pair[1])
                ratios.append(pair[1] / pair[0])
        ratios.sort()
        yield (
            f"| {type(task).__name__} | {statistics.median(by_hand):,.0f} | {statistics.median(ours):,.0f} "
            f"| {statistics.median(ratios):.3f} | {ratios[2]:.3f} to {ratios[-3]:.3f} |"
        )


def _ours(task: RandomMnist, steps: int) -> float:
    """Samples a second of `fit` from its first log entry to its last: without its start and its one validation."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        process = Process.start("cpu")
        run = RunDirectory(Path(folder) / "r", 0)
        config = session.settle(Config(max_steps=steps, batch_size=BATCH_SIZE, log_steps=_log_steps(steps)), task, process, run)
        job = session.build(config, task, process, run, Path(folder))
        run.begin(0, 0, steps, BATCH_SIZE)
        fit(job, StopRequest())
        run.close()
        lines = (run.path / "metrics.jsonl").read_text().splitlines()
    first, *_, last = [entry for line in lines if (entry := json.loads(line))["kind"] == "train"]
    return (last["step"] - first["step"]) * BATCH_SIZE / (last["time_unix_s"] - first["time_unix_s"])


def _by_hand(task: RandomMnist, steps: int) -> float:
    """Samples a second of the loop that one would write: no log, no checks, no checkpoint."""
    images, labels = task.train_dataset(Path()).tensors
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    per_epoch = len(images) // BATCH_SIZE
    for step in range(steps):
        if step == _log_steps(steps):
            begin = time.perf_counter()
        if step % per_epoch == 0:
            order = torch.randperm(len(images))
        chosen = order[step % per_epoch * BATCH_SIZE :][:BATCH_SIZE]
        inputs = (images.index_select(0, chosen).float() / 255 - task.mean) / task.std
        loss = F.cross_entropy(model(inputs), labels.index_select(0, chosen))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (steps - _log_steps(steps)) * BATCH_SIZE / (time.perf_counter() - begin)


def _log_steps(steps: int) -> int:
    return min(50, steps // 4)
