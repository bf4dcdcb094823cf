"""Profile some steps of a training, and yield what its trace shows."""

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.gpu.program import tried
from tests.gpu.programs.training import after_each_step, train
from tests.gpu.traces import summary

_FIRST, _LAST = 10, 25  # steps
_LEAST_BYTES = 2**16  # of a copy that is one of a batch


def measure(
    device: str, folder: str, cases: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """Yield for each of `cases` the `traces.summary` of some steps.

    A case has the settings of a `Config`. With `placed` false, its data stays on the CPU.
    """
    for name, settings in cases.items():
        yield name, tried(partial(_profiled, device, folder, name, settings))


def _profiled(device: str, folder: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    profile = torch.profiler.profile(activities=activities)

    def watch(step: int) -> None:
        if step == _FIRST:
            profile.start()
        elif step == _LAST:
            if device == "cuda":
                torch.cuda.synchronize()
            profile.stop()

    settings = dict(settings)
    placed = contextlib.nullcontext()
    if not settings.pop("placed", True):
        placed = patch("trainer.loop.build.place_tensors", lambda dataset, _device: dataset)  # type: ignore[assignment]
    with placed, after_each_step(watch):
        quiet = {"log_steps": 1000, "digest_steps": 1000, "max_steps": 30, "threads": 1}
        train(device, folder, name.replace(" ", "-"), **{**quiet, **settings})
    trace = Path(folder) / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    return summary(events, _LAST - _FIRST, _LEAST_BYTES)
