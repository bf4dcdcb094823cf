"""Measure the speed of Trainbox's training steps."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.program import tried
from tests.gpu.programs.training import train


def measure(
    device: str, folder: str, seconds: float, cases: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """Yield for each of `cases`, the settings of a `Config`, its examples and steps per second."""
    for number, (name, settings) in enumerate(cases.items()):
        yield name, tried(partial(_speed, device, folder, f"r{number}", seconds, settings))


def _speed(
    device: str, folder: str, run: str, seconds: float, settings: dict[str, Any]
) -> dict[str, float]:
    found = train(device, folder, run, measure_s=seconds, **{"epochs": 100_000, **settings})
    measured = json.loads(Path(folder, "runs", run, "measured.json").read_text())
    return {
        "examples_per_s": found["samples_per_second"],
        "steps_per_s": found["samples_per_second"] / settings["batch_size"],
        "data_share": measured["data_seconds"][0] / measured["seconds"],
    }
