"""Measure the speed of Trainbox's steps, and of its trainings with all their records."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.gpu.program import tried
from tests.gpu.programs.training import train
from trainer.measure import meter

# Settings with which no entry, digest, validation or checkpoint is among the measured steps.
_STEPS_ALONE = {
    "eval_every": 100_000,
    "log_steps": 10**6,
    "digest_steps": 10**6,
    "checkpoint_minutes": 10**6,
}
_DEFAULTS = {"epochs": 100_000, "capture": "auto"}
_WARM_UP_SHARE = 0.4  # 2 s of warm-up before 5 s


def measure(
    device: str, folder: str, seconds: float, cases: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """Yield for each of `cases`, the settings of a `Config`, its examples and steps per second.

    With `steps_alone`, a case measures steps without any entry, digest, validation or checkpoint.
    Otherwise, it measures a training with all of them.
    """
    for number, (name, settings) in enumerate(cases.items()):
        yield name, tried(partial(_speed, device, folder, f"r{number}", seconds, settings))


def _speed(
    device: str, folder: str, run: str, seconds: float, settings: dict[str, Any]
) -> dict[str, Any]:
    if settings.get("steps_alone"):
        settings = {**settings, **_STEPS_ALONE}
    settings = {name: value for name, value in settings.items() if name != "steps_alone"}
    with patch.object(meter, "_WARM_UP_SHARE", _WARM_UP_SHARE):
        found = train(device, folder, run, measure_s=seconds, **_DEFAULTS | settings)
    measured, manifest = (
        json.loads(Path(folder, "runs", run, f"{name}.json").read_text())
        for name in ("measured", "manifest")
    )
    return {
        "examples_per_s": found["samples_per_second"],
        "steps_per_s": found["samples_per_second"] / settings["batch_size"],
        "data_share": measured["data_seconds"][0] / measured["seconds"],
        "eager": manifest["rehearsal"]["eager"],
        "rehearsal": manifest["rehearsal"]["seconds"],
    }
