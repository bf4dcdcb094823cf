"""Measure the CPU time of a small training against a loop by hand, with short and long epochs.

The model has 161 weights, so what follows a step, an epoch or a new best is visible. The loop by
hand keeps its data in memory, validates after each epoch and copies the best weights. Nothing that
is measured includes a start: it is the difference of two trainings, or of two sweeps.
"""

import functools
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainbox.task import Task

_BATCH_SIZE, _STEPS = 64, 2000
_SHORT, _LONG = 10, 1000  # steps of an epoch
_FEW, _TRIALS = 2, 12
_ROUNDS = 5
_NUMBERS = itertools.count()  # of runs


@dataclass(frozen=True)
class Perceptron(Task):
    """A perceptron of 8, 16 and 1 units."""

    steps: int = _SHORT

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        return self._examples(self.steps * _BATCH_SIZE, 0)

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return self._examples(_BATCH_SIZE, 1)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        inputs_B8, targets_B = batch
        return {"squared_error": F.mse_loss(model(inputs_B8), targets_B, reduction="none")}

    def _examples(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        inputs_N8 = torch.randn(count, 8, generator=generator)
        return TensorDataset(inputs_N8, inputs_N8.sum(1) + inputs_N8.prod(1))


def measure() -> Iterator[str]:
    yield f"CPU time of {_STEPS:,} steps of {_BATCH_SIZE} examples, without the start:"
    yield ""
    yield "| | steps of an epoch | s of CPU | by hand | ratio: median | lowest to highest |"
    yield "|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        for steps in (_SHORT, _LONG):
            alone = functools.partial(_alone_s, folder, steps)
            yield _row("`trainbox train`", steps, alone)
        yield _row("trial of `trainbox sweep`", _SHORT, functools.partial(_trial_s, folder))


def _alone_s(folder: str, steps: int) -> float:
    words = ("trainer", "train", *_arguments(steps))
    short, long = (
        _cpu_s(
            folder, *words, "--max-steps", str(count), "--run", f"{steps}-{count}-{next(_NUMBERS)}"
        )
        for count in (steps, _STEPS + steps)
    )
    return long - short


def _trial_s(folder: str) -> float:
    words = ("entrypoint", "sweep", *_arguments(_SHORT), "--max-steps", str(_STEPS))
    few, many = (
        _cpu_s(
            folder,
            *words,
            "--processes",
            "2",
            "--seeds",
            str(count),
            "--name",
            f"s{count}-{next(_NUMBERS)}",
        )
        for count in (_FEW, _TRIALS)
    )
    return (many - few) / (_TRIALS - _FEW)


def _arguments(steps: int) -> tuple[str, ...]:
    options = ("--device", "cpu", "--set", f"steps={steps}", "--batch-size", str(_BATCH_SIZE))
    return (f"{__file__}:Perceptron", *options, "--threads", "1")


def _row(name: str, steps: int, ours: Callable[[], float]) -> str:
    rounds = [(_by_hand(steps), ours(), _by_hand(steps)) for _ in range(_ROUNDS)]
    ratios = [2 * ours_s / (before_s + after_s) for before_s, ours_s, after_s in rounds]
    by_hand_s = statistics.median([each for before, _, after in rounds for each in (before, after)])
    return (
        f"| {name} | {steps:,} | {statistics.median(ours_s for _, ours_s, _ in rounds):.2f} | "
        f"{by_hand_s:.2f} | {statistics.median(ratios):.2f} | "
        f"{min(ratios):.2f} to {max(ratios):.2f} |"
    )


def _cpu_s(folder: str, *arguments: str) -> float:
    """Return the CPU time of a module of Python and of its children."""
    command = [sys.executable, "-P", "-m", *arguments]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    assert status == 0, (arguments, status)
    return used.ru_utime + used.ru_stime


def _by_hand(steps: int) -> float:
    """Return the CPU time of a loop with its data in memory, after a warm-up."""
    task = Perceptron(steps)
    inputs_N8, targets_N = task.train_dataset(Path()).tensors
    validation = task.validation_dataset(Path()).tensors
    torch.set_num_threads(1)
    for _ in range(2):
        begin_s = time.process_time()
        torch.manual_seed(0)
        model, best = task.build_model(), math.inf
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        loss_sum = 0.0
        for _epoch in range(_STEPS // steps):
            for chosen_B in torch.randperm(len(inputs_N8)).split(_BATCH_SIZE):
                optimizer.zero_grad()
                loss = F.mse_loss(model(inputs_N8[chosen_B]), targets_N[chosen_B])
                loss.backward()
                optimizer.step()
                schedule.step()
                loss_sum += loss.item()
            with torch.no_grad():
                validated = F.mse_loss(model(validation[0]), validation[1]).item()
            if validated < best:
                best = validated
                _best_weights = {name: t.clone() for name, t in model.state_dict().items()}
    return time.process_time() - begin_s
