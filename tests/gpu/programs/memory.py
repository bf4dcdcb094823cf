"""Train with too little GPU memory: at the start, where the batch is cut, and in the middle."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.gpu.digests import failed_allocations, last
from tests.gpu.programs.convolutions import limit_memory
from tests.gpu.programs.training import after_each_step, train
from trainer.errors import Failure

_TASK = "tests.gpu.tasks:Wide"


def measure(device: str, folder: str, room_mib: int) -> Iterator[tuple[str, Any]]:
    """Yield the micro-batches and digests with and without a limit of `room_mib`."""
    on_gpu = device == "cuda"
    fields: dict[str, Any] = {} if on_gpu else {"size": 8, "channels": 4}
    settings = {"precision": "fp32", "max_steps": 6, "digest_steps": 1, "threads": 1}
    if on_gpu:
        limit_memory(room_mib)
    limited = fields if on_gpu else {**fields, "room": 16}
    train(device, folder, "cut", _TASK, fields=limited, **settings)
    if on_gpu:
        limit_memory(None)
    runs = Path(folder, "runs")
    accumulation = json.loads((runs / "cut" / "config.json").read_text())["accumulation"]
    yield "cut", {"accumulation": accumulation, "digest": last(runs / "cut"),
                  "failed": failed_allocations(runs / "cut")}  # fmt: skip
    train(device, folder, "given", _TASK, fields=fields, accumulation=accumulation, **settings)
    yield "given", last(runs / "given")
    train(device, folder, "whole", _TASK, fields=fields, **settings)
    yield "whole", last(runs / "whole")
    if on_gpu:
        for room in (1024, 256, 64, 0):
            yield f"pressed to {room} MiB", _pressed(device, folder, room, fields, settings)


def _pressed(
    device: str, folder: str, room_mib: int, fields: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Limit the memory after the third step of the run `whole`, and return what came out."""
    run = f"pressed-{room_mib}"

    def press(step: int) -> None:
        if step == 3:
            limit_memory(room_mib)

    found: dict[str, Any] = {"error": None}
    with after_each_step(press), contextlib.ExitStack() as stack:
        stack.callback(limit_memory, None)
        try:
            train(device, folder, run, _TASK, fields=fields, **settings)
        except Failure as failure:
            found["stopped"] = f"exit code {failure.exit_code}: {str(failure)[:300]}"
        except Exception as error:  # noqa: BLE001 - the check reports it
            found["unexpected"] = f"{type(error).__name__}: {str(error)[:300]}"
    found.pop("error")
    path = Path(folder, "runs", run)
    if torch.cuda.is_initialized():
        found["digest"], found["failed"] = last(path), failed_allocations(path)
    return found
