"""Measure training steps against a handwritten loop over the same tensors, in turns.

The handwritten loop computes in fp32.
"""

import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainer.loop.build import build, settle
from trainer.loop.fit import fit
from trainer.parallel.strategy import join
from trainer.records.run_gpus import RunGpus
from trainer.records.run_log import RunLog
from trainer.settings.config import Config
from trainer.system.signals import StopRequest
from trainer.tasks.mnist import Mnist

# A model that has memorised random labels has gradients of denormal floats, which are slow.
LEARNING_RATE = 1e-6
TURNS = 60
WARM_UP = 4  # turns
BATCH_SIZE = 128
EXAMPLES = 60_000  # as MNIST: Trainbox records digests of the weights at the end of each epoch


@dataclass(frozen=True)
class RandomMnist(Mnist):
    """MNIST's CNN on random pictures, which has the same speed without a download."""

    examples: int = 12_800

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(
            0, 256, (self.examples, 1, 28, 28), dtype=torch.uint8, generator=generator
        )
        return TensorDataset(images, torch.randint(0, 10, (self.examples,), generator=generator))

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return TensorDataset(*(tensor[:1] for tensor in self.train_dataset(data_dir).tensors))


@dataclass(frozen=True)
class Mlp(RandomMnist):
    """A small perceptron with the size of semi-supervised VAEs of MNIST."""

    hidden: int = 512

    def build_model(self) -> nn.Module:
        wide = self.hidden
        layers = [
            nn.Linear(784, wide),
            nn.ReLU(),
            nn.Linear(wide, wide),
            nn.ReLU(),
            nn.Linear(wide, 10),
        ]
        return nn.Sequential(nn.Flatten(), *layers)


def measure() -> Iterator[str]:
    yield (
        "| model, batch 128 | Trainbox's precision | by hand in fp32, samples/s | Trainbox, "
        "samples/s | ratio (median of turns) | middle half |"
    )
    yield "|---|---|---|---|---|---|"
    for task, steps, precision in (
        (Mlp(examples=EXAMPLES), 50, "fp32"),
        (RandomMnist(examples=EXAMPLES), 5, "fp32"),
        (RandomMnist(examples=EXAMPLES), 5, "bf16"),
    ):
        ours, by_hand = _in_turns(task, steps, precision)
        ratios = sorted(mine / plain for mine, plain in zip(ours, by_hand, strict=True))
        yield (
            f"| {type(task).__name__} | {precision} | {statistics.median(by_hand):,.0f} | "
            f"{statistics.median(ours):,.0f} "
            f"| {statistics.median(ratios):.3f} | {ratios[TURNS // 4]:.3f} to "
            f"{ratios[-TURNS // 4]:.3f} |"
        )


def _in_turns(task: RandomMnist, steps: int, precision: str) -> tuple[list[float], list[float]]:
    """Return the samples per second of `fit` and of the handwritten loop, in turns.

    A turn has `steps` steps. The turns alternate, so that both loops run under the same load. Each
    turn of `fit` writes a log entry. The handwritten loop has no log, checks or checkpoints.
    Neither loop validates.
    """
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        strategy = join("cpu")
        run = _RunInTurns(Path(folder) / "r", _by_hand(task, steps), steps)
        total_steps = (TURNS + WARM_UP) * steps
        settings = Config(
            max_steps=total_steps,
            batch_size=BATCH_SIZE,
            log_steps=steps,
            eval_every=total_steps,
            learning_rate=LEARNING_RATE,
            precision=precision,
        )
        config = settle(settings, task, strategy, run)
        job = build(config, task, strategy, run, RunGpus(strategy, run.folder), Path(folder))
        run.begin(0, 0, job.schedule)
        run.resume_ours()
        fit(job, StopRequest())
        run.close()
    return run.ours[WARM_UP:], run.by_hand[WARM_UP:]


class _RunInTurns(RunLog):
    """A run log that runs the handwritten loop for a turn after each log entry."""

    def __init__(self, path: Path, hand: Iterator[None], steps: int) -> None:
        super().__init__(path, 0)
        self.ours: list[float] = []
        self.by_hand: list[float] = []
        self._hand, self._samples = hand, steps * BATCH_SIZE

    def resume_ours(self) -> None:
        self._since = time.perf_counter()

    def record(self, kind: str, *arguments: Any) -> None:
        super().record(kind, *arguments)
        if kind == "train":
            begin = time.perf_counter()
            self.ours.append(self._samples / (begin - self._since))
            next(self._hand)
            self.by_hand.append(self._samples / (time.perf_counter() - begin))
            self.resume_ours()


def _by_hand(task: RandomMnist, steps: int) -> Iterator[None]:
    """Train with a handwritten loop, and yield after each `steps` steps."""
    images, labels = task.train_dataset(Path()).tensors
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    per_epoch = len(images) // BATCH_SIZE
    for step in itertools.count():
        if step and step % steps == 0:
            yield
        if step % per_epoch == 0:
            order = torch.randperm(len(images))
        chosen = order[step % per_epoch * BATCH_SIZE :][:BATCH_SIZE]
        inputs = (images.index_select(0, chosen).float() / 255 - task.mean) / task.std
        loss = F.cross_entropy(model(inputs), labels.index_select(0, chosen))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
