"""Count the operations for which the host waits for the GPU, in the middle of a training."""

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from tests.gpu.program import tried
from tests.gpu.programs.training import after_each_step, train
from tests.support.paths import ROOT

_FIRST, _LAST = 5, 45  # steps
_QUIET: dict[str, Any] = {
    "max_steps": 60,
    "batch_size": 16,  # 89 steps an epoch, so no validation
    "log_steps": 1000,
    "digest_steps": 1000,
    "threads": 1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "--clip-norm": {"clip_norm": 1.0},
    "--precision fp32": {"precision": "fp32"},
    "--precision fp16": {"precision": "fp16"},
    "--skip-nonfinite": {"skip_nonfinite": 1},
    "2 shards": {"shards": 2},
    "loader workers": {"task": "digits_augmented", "workers": 2},
    "data on the CPU": {},
}


def measure(device: str, folder: str) -> Iterator[tuple[str, Any]]:
    """Yield for each variant {line of Trainbox: times that it waited in 40 steps}."""
    for name, settings in VARIANTS.items():
        if device == "cpu" and settings.get("precision") == "fp16":
            continue
        yield name, tried(partial(_count, device, folder, name, settings))


def _count(device: str, folder: str, name: str, settings: dict[str, Any]) -> dict[str, int]:
    found: Counter[str] = Counter()
    shown = warnings.showwarning

    def note(message: Any, *arguments: Any, **options: Any) -> None:
        if "synchroniz" in str(message):
            found[_line()] += 1

    def watch(step: int) -> None:
        if device != "cuda":
            return
        if step == _FIRST:
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
        elif step == _LAST:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown

    stays = patch("trainer.loop.build.place_tensors", lambda dataset, _device: dataset)
    placed = stays if name == "data on the CPU" else contextlib.nullcontext()
    with placed, warnings.catch_warnings(), after_each_step(watch):
        options = {"task": "digits", **_QUIET, **settings}
        train(device, folder, name.replace(" ", "-").strip("-"), **options)
    return dict(found.most_common())


def _line() -> str:
    """Return the innermost line of Trainbox that is being executed."""
    frames = traceback.extract_stack()
    own = [f for f in frames if "/trainer/" in f.filename and str(ROOT.resolve()) in f.filename]
    frame = own[-1] if own else frames[-3]
    return f"{frame.filename.rpartition('/trainer/')[2]}:{frame.lineno}"
