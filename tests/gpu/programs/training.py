"""Train in this process, as a worker of a sweep does, and look inside."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from trainbox.options.config import Config
from trainer.checks import validation_sample
from trainer.loop import validate
from trainer.loop.arithmetic import set_cuda_variables
from trainer.loop.out_of_memory import free_memory
from trainer.records.run_log import RunLog
from trainer.session.train import train_task
from trainer.system.signals import StopRequest

set_cuda_variables()
if importlib.util.find_spec("matplotlib") is None:
    for module in (validate, validation_sample):
        module.draw = lambda *_arguments: dict  # no pictures, which no check reads


def train(
    device: str,
    folder: str,
    run: str,
    task: str,
    *,
    measure_s: float | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Train `task` with the settings of a `Config` in `folder`/runs/`run`; return its metrics."""
    torch.set_default_dtype(torch.float32)
    try:
        return train_task(
            Config(task=task, **settings),
            StopRequest(),
            device,
            Path(folder, "runs"),
            run,
            Path(folder, "data"),
            "never",
            measure_s=measure_s,
        )
    finally:
        free_memory()


@contextlib.contextmanager
def after_each_step(call: Callable[[int], None]) -> Iterator[None]:
    """Call `call` with the number of steps that a training has computed, after each step."""
    advance, steps = RunLog.advance, 0

    def count(run: RunLog) -> None:
        nonlocal steps
        advance(run)
        steps += 1
        call(steps)

    with patch.object(RunLog, "advance", count):
        yield
