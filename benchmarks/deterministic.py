"""Measure `--deterministic` against `--fast`, in turns."""

import io
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import torch

from benchmarks.loop import RandomMnist
from trainbox.contract.config import Config
from trainbox.task import Task
from trainer.loop.build import build, build_data
from trainer.loop.fit import fit
from trainer.parallel.strategy import join
from trainer.run.checkpoint import RunCheckpoints
from trainer.run.run_gpus import RunGpus
from trainer.run.run_log import RunLog
from trainer.session.settle import settle
from trainer.system.signals import StopRequest
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
        ratios = sorted(ours / fast for ours, fast in pairs)
        ours_s, fast_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        yield (
            f"| {type(task).__name__} | {ours_s:.2f} | {fast_s:.2f} | "
            f"{statistics.median(ratios):.3f} "
            f"| {ratios[TURNS // 4]:.3f} to {ratios[-TURNS // 4]:.3f} |"
        )


def _seconds(task: Task, steps: int, deterministic: bool) -> float:
    """Return the seconds of `steps` training steps."""
    torch.set_deterministic_debug_mode("default")
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        strategy = join("cpu")
        run = RunLog(Path(folder) / "r", 0)
        settings = Config(max_steps=steps, eval_every=steps, workers=0, deterministic=deterministic)
        config = settle(settings, task, strategy, run)
        data = build_data(config, task, strategy.world, Path(folder))
        checkpoints = RunCheckpoints(run.path / "checkpoints", config.keep, True, run.report)
        job = build(config, data, strategy, run, RunGpus(strategy, run.folder), checkpoints)
        run.begin(0, 0, job.schedule)
        fit(job, StopRequest())
        run.close()
    torch.set_deterministic_debug_mode("default")
    return job.state.progress.train_seconds
