"""Count the operations for which the host waits for the GPU, in the middle of a training."""

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.gpu.program import tried
from tests.gpu.programs.tasks_once import TASKS
from tests.gpu.programs.training import after_each_step, train
from tests.support.films import write_films
from tests.support.har_folder import write_folder
from tests.support.paths import ROOT
from tests.support.pictures import make_pictures
from tests.support.texts import write_texts

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
    # The batches of a validation; its result and the log after it may wait.
    "validations": {"batch_size": 64, "max_steps": 50},
    **{
        name: {"task": name.split()[0], "fields": TASKS[name], "batch_size": 4, "workers": 2}
        for name in ("images", "text", "video", "har", "har lstm", "ssvae")
    },
    "images, mixed": {
        "task": "images",
        "fields": {**TASKS["images"], "mixup": 0.2, "cutmix": 1.0},
        "batch_size": 4,
        "workers": 2,
    },
}


def write_data(folder: Path) -> None:
    """Write enough data for an epoch of more steps than are watched."""
    make_pictures(folder / "shapes", ("cross", "disc", "stripes"), 100, seed=0)
    write_films(folder / "video")
    write_folder(folder)
    write_texts(folder / "texts", 100)


def measure(device: str, folder: str, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield for each of the variants {line of Trainbox: times that it waited in 40 steps}."""
    write_data(Path(folder, "data"))
    for name in names:
        settings = VARIANTS[name]
        if device == "cpu" and settings.get("precision") == "fp16":
            continue
        yield name, tried(partial(_count, device, folder, name, settings))


def _count(device: str, folder: str, name: str, settings: dict[str, Any]) -> dict[str, int]:
    found, seen = Counter[str](), list[bool]()
    shown = warnings.showwarning

    def note(message: Any, *arguments: Any, **options: Any) -> None:
        # torch's first `set_sync_debug_mode` also warns, with another text.
        if "called a synchronizing CUDA operation" in str(message):
            seen.append(True)
            line, functions = _line()
            if name != "validations" or ("add_up" in functions and "_add" not in functions):
                found[line] += 1

    def watch(step: int) -> None:
        if device != "cuda":
            return
        if step == _FIRST:
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            torch.zeros(1, device=device).item()
            assert seen, "torch does not warn about a wait"
            found.clear()
        elif step == _LAST:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown

    stays = patch("trainer.loop.build.place_tensors", lambda dataset, _device: dataset)
    placed = stays if name == "data on the CPU" else contextlib.nullcontext()
    with placed, warnings.catch_warnings(), after_each_step(watch):
        options = {"task": "digits", **_QUIET, **settings}
        train(device, folder, name.replace(" ", "-").strip("-"), **options)
    return dict(found.most_common())


def _line() -> tuple[str, set[str]]:
    """Return the innermost line of Trainbox that is being executed, and all functions."""
    frames = traceback.extract_stack()
    own = [f for f in frames if "/trainer/" in f.filename and str(ROOT.resolve()) in f.filename]
    frame = own[-1] if own else frames[-3]
    line = f"{frame.filename.rpartition('/trainer/')[2]}:{frame.lineno}"
    return line, {frame.name for frame in frames}
