"""Train with too little GPU memory: from the start, where the batch is cut, or in the middle.

cuDNN keeps the algorithm that it has found for a shape, so each process trains once.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu.digests import failed_allocations, last
from tests.gpu.programs.convolutions import limit_memory
from tests.gpu.programs.training import after_each_step, train
from trainbox.errors import Failure

_PRESSED_AT = 3  # step


def measure(
    device: str,
    folder: str,
    run: str,
    fields: dict[str, Any],
    accumulation: int | None = None,
    room_mib: int | None = None,
    later: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Yield what came out of a training with a limit of `room_mib` from the start, or `later`."""

    def press(step: int) -> None:
        if later and step == _PRESSED_AT and room_mib is not None and device == "cuda":
            limit_memory(room_mib)

    if room_mib is not None and not later and device == "cuda":
        limit_memory(room_mib)
    settings: dict[str, Any] = {"precision": "fp32", "max_steps": 6, "digest_steps": 1}
    settings |= {"threads": 1, "fields": fields, "accumulation": accumulation}
    try:
        with after_each_step(press):
            train(device, folder, run, "tests.gpu.tasks:Wide", **settings)
    except Failure as failure:
        yield "stopped", f"exit code {failure.exit_code}: {str(failure)[:300]}"
    path = Path(folder, "runs", run)
    yield "accumulation", json.loads((path / "config.json").read_text())["accumulation"]
    yield "digest", last(path)
    yield "failed", failed_allocations(path)
