"""Measure training steps against handwritten loops over the same tensors, in turns.

A handwritten loop runs in a process of its own, as a script does, and computes in fp32. One of the
two processes always waits for the other.
"""

import itertools
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.jobs import trained
from trainbox.options.config import Config
from trainer.data.schedule import Schedule
from trainer.records.run_log import RunLog
from trainer.tasks.mnist import Mnist

# A model that has memorised random labels has gradients of denormal floats, which are slow.
LEARNING_RATE = 1e-6
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
        "| model, batch 128 | Trainbox's precision | loop by hand | by hand in fp32, samples/s "
        "| Trainbox, samples/s | ratio of speeds: median of turns (95 % interval) "
        "| ratio of CPU times |"
    )
    yield "|---|---|---|---|---|---|---|"
    for task, turns, steps, precision, hand in (
        (Mlp(examples=EXAMPLES), 120, 50, "fp32", bare_loop),
        (Mlp(examples=EXAMPLES), 60, 50, "fp32", usual_loop),
        (RandomMnist(examples=EXAMPLES), 60, 5, "fp32", bare_loop),
        (RandomMnist(examples=EXAMPLES), 60, 5, "bf16", bare_loop),
    ):
        ours, by_hand = in_turns(task, turns, steps, precision, hand)
        samples = steps * BATCH_SIZE
        turns_of_both = list(zip(ours, by_hand, strict=True))
        wall, cpu = (
            median_and_interval([plain[clock] / mine[clock] for mine, plain in turns_of_both])
            for clock in (0, 1)
        )
        yield (
            f"| {type(task).__name__} | {precision} | {hand.__name__.removesuffix('_loop')} "
            f"| {samples / statistics.median(wall_s for wall_s, _ in by_hand):,.0f} "
            f"| {samples / statistics.median(wall_s for wall_s, _ in ours):,.0f} "
            f"| {wall} | {cpu} |"
        )


def median_and_interval(ratios: list[float]) -> str:
    """Return the median of the ratios, and its 95 % interval."""
    ordered, reach = sorted(ratios), math.sqrt(len(ratios))
    low, high = round(len(ratios) / 2 - reach), round(len(ratios) / 2 + reach)
    return f"{statistics.median(ratios):.3f} ({ordered[low]:.3f} to {ordered[high - 1]:.3f})"


Seconds = tuple[float, float]  # wall time, and CPU time of the process


def in_turns(
    task: RandomMnist,
    turns: int,
    steps: int,
    precision: str,
    hand: "LoopByHand",
    captures: bool = False,
) -> tuple[list[Seconds], list[Seconds]]:
    """Return the times of each turn of `fit`, which may capture steps, and of a handwritten loop.

    The loops alternate after `steps` steps, so that both run under the same load. Each turn of
    `fit` writes a log entry. The handwritten loop has no log, checks or checkpoints. Neither loop
    validates.
    """
    total_steps = (turns + WARM_UP) * steps
    settings = Config(
        max_steps=total_steps,
        batch_size=BATCH_SIZE,
        log_steps=steps,
        eval_every=total_steps,
        learning_rate=LEARNING_RATE,
        precision=precision,
    )
    with _HandProcess(hand, task, steps) as by_hand:
        run = trained(
            task, settings, lambda path: _AlternatingRun(path, by_hand, steps), captures
        ).run
    assert isinstance(run, _AlternatingRun)
    return run.ours[WARM_UP:], run.by_hand[WARM_UP:]


class _AlternatingRun(RunLog):
    """A run log that lets the handwritten loop train after each `steps` steps of ours.

    The time of a log entry belongs to the next turn.
    """

    def __init__(self, path: Path, hand: "_HandProcess", steps: int) -> None:
        super().__init__(path, 0)
        self.ours: list[Seconds] = []
        self.by_hand: list[Seconds] = []
        self._hand, self._steps, self._done = hand, steps, 0

    def begin(self, step: int, evaluated_step: int, schedule: Schedule) -> None:
        super().begin(step, evaluated_step, schedule)
        self._since = _clocks()

    def advance(self) -> None:
        super().advance()
        self._done += 1
        if self._done % self._steps == 0:
            self.ours.append(_elapsed(self._since))
            self.by_hand.append(self._hand.turn())
            self._since = _clocks()


class _HandProcess:
    """A process that trains with a handwritten loop, `steps` steps for each call of `turn`."""

    def __init__(self, hand: "LoopByHand", task: RandomMnist, steps: int) -> None:
        self._connection, self._other = Pipe()
        # Not a fork, which would inherit the settings that Trainbox has made in this process.
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(self._other, hand, task, steps), daemon=True
        )

    def __enter__(self) -> "_HandProcess":
        self._process.start()
        self._other.close()  # so that `turn` raises EOFError if the process ends
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.join()

    def turn(self) -> Seconds:
        self._connection.send("train")
        seconds: Seconds = self._connection.recv()
        return seconds


def _serve(
    connection: "Connection[Seconds, str]", hand: "LoopByHand", task: RandomMnist, steps: int
) -> None:
    loop = hand(task, steps)
    while True:
        connection.recv()
        since = _clocks()
        next(loop)
        connection.send(_elapsed(since))


def _clocks() -> Seconds:
    return time.perf_counter(), time.process_time()


def _elapsed(since: Seconds) -> Seconds:
    wall_s, cpu_s = _clocks()
    return wall_s - since[0], cpu_s - since[1]


def bare_loop(task: RandomMnist, steps: int) -> Iterator[None]:
    """Train with the fastest handwritten loop that we know, and yield after each `steps` steps.

    It gathers batches from tensors in memory, and has neither a schedule nor the sum of its losses.
    """
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


def usual_loop(task: RandomMnist, steps: int) -> Iterator[None]:
    """Train with the loop of most scripts, and yield after each `steps` steps.

    It has a DataLoader without workers, a schedule of the learning rate, and the sum of its losses.
    """
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EXAMPLES)
    loader = DataLoader(task.train_dataset(Path()), BATCH_SIZE, shuffle=True, drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    loss_sum = 0.0
    for step, (images, labels) in enumerate(batches):
        if step and step % steps == 0:
            yield
        optimizer.zero_grad()
        loss = F.cross_entropy(model((images.float() / 255 - task.mean) / task.std), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        loss_sum += loss.item()


LoopByHand = Callable[[RandomMnist, int], Iterator[None]]
