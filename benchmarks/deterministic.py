"""Measure `--deterministic` against `--fast`, in turns."""

import statistics
from collections.abc import Iterator

import torch

from benchmarks.jobs import median_and_middle, trained
from benchmarks.loop import RandomMnist
from trainbox.options.config import Config
from trainbox.task import Task
from trainer.tasks.digits import Digits
from trainer.tasks.digits_augmented import DigitsAugmented

TURNS = 9


def measure() -> Iterator[str]:
    yield (
        "| task | deterministic, s | fast, s | deterministic / fast (median of turns) | "
        "middle half |"
    )
    yield "|---|---|---|---|---|"
    for task, steps in ((Digits(), 220), (DigitsAugmented(), 66), (RandomMnist(), 20)):
        pairs = [
            (_seconds(task, steps, True), _seconds(task, steps, False)) for _ in range(TURNS + 1)
        ][1:]
        ratios = [ours / fast for ours, fast in pairs]
        ours_s, fast_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        yield (
            f"| {type(task).__name__} | {ours_s:.2f} | {fast_s:.2f} | {median_and_middle(ratios)} |"
        )


def _seconds(task: Task, steps: int, deterministic: bool) -> float:
    """Return the seconds of `steps` training steps."""
    torch.set_deterministic_debug_mode("default")
    settings = Config(max_steps=steps, eval_every=steps, workers=0, deterministic=deterministic)
    job = trained(task, settings)
    torch.set_deterministic_debug_mode("default")
    return job.state.progress.train_seconds
