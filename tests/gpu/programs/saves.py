"""Save checkpoints during a training, and compare each with a copy that waits for the GPU."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.gpu.digests import entries
from tests.gpu.programs.training import train
from trainer.records.checkpoint import RunCheckpoints
from trainer.records.digest import value_digest


def measure(device: str, folder: str, layers: int) -> Iterator[tuple[str, Any]]:
    """Yield the pause of each save, and whether each file has the weights of its step."""
    pauses: list[tuple[float, float]] = []
    save, wait = RunCheckpoints.save, RunCheckpoints.wait
    waited = 0.0

    def timed_wait(checkpoints: RunCheckpoints) -> None:
        nonlocal waited
        begin = time.perf_counter()
        wait(checkpoints)
        waited += time.perf_counter() - begin

    def timed_save(checkpoints: RunCheckpoints, *arguments: Any, **options: Any) -> None:
        nonlocal waited
        if device == "cuda":
            torch.cuda.synchronize()  # the steps before the save are not part of its pause
        waited, begin = 0.0, time.perf_counter()
        save(checkpoints, *arguments, **options)
        pauses.append((time.perf_counter() - begin - waited, waited))

    settings = {"max_steps": 40, "checkpoint_steps": 10, "digest_steps": 10, "keep": 9}
    with (
        patch.object(RunCheckpoints, "save", timed_save),
        patch.object(RunCheckpoints, "wait", timed_wait),
    ):
        train(device, folder, "r", "tests.gpu.tasks:Heavy", fields={"layers": layers}, **settings)
    yield "pauses_ms", [round(1000 * pause, 2) for pause, _ in pauses]
    yield "waits_ms", [round(1000 * waited, 2) for _, waited in pauses]
    run = Path(folder, "runs", "r")
    recorded = {entry["step"]: entry["model"] for entry in entries(run)}
    for file in sorted((run / "checkpoints").glob("step-*.pt")):
        step = int(file.stem.removeprefix("step-"))
        model = torch.load(file, map_location="cpu", weights_only=True)["model"]
        yield "mib", round(file.stat().st_size / 2**20)
        yield f"step {step}", value_digest(model) == recorded[step]
