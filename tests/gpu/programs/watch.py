"""Watch the GPU as the launcher of a training does, and yield what the watch has read."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entrypoint.driver.gpus import Sample, Unread
from entrypoint.driver.process import Driver
from entrypoint.health.limits import Limits
from entrypoint.health.watch import Watch


class _Samples:
    """Keeps each sample of the watch."""

    names = ("utilization_percent",)

    def __init__(self, folder: Path) -> None:
        self.metrics = folder / "events.jsonl"
        self.samples: list[Sample] = []

    def take(self, sample: Sample) -> None:
        self.samples.append(sample)

    def step(self) -> int:
        return 0


def measure(device: str, folder: str, seconds: float) -> Iterator[tuple[str, Any]]:
    """Yield the number of values in each sample of the first GPU, and the events."""
    telemetry, drivers = _Samples(Path(folder)), (Driver(), Driver())
    gpus = drivers[0].detect().gpus[:1]
    if not gpus:
        return
    watch = Watch(*drivers, gpus, Limits(), telemetry.metrics, {}, telemetry=telemetry)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        watch.fatal()
        time.sleep(0.1)
    yield "fatal", watch.final_check()
    for driver in drivers:
        driver.close()
    uuid = gpus[0].mig_parent or gpus[0].uuid
    read = [sample.gpus.get(uuid, {}) for sample in telemetry.samples]
    yield "values", [sum(not isinstance(v, Unread) for v in one.values()) for one in read]
    yield "utilization_percent", [str(one.get("utilization_percent")) for one in read]
    events = telemetry.metrics
    lines = events.read_text().splitlines() if events.exists() else []
    yield "events", [json.loads(line) for line in lines]
