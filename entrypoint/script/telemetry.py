"""The load and the energy of the GPUs of a script, which does not read them itself."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from entrypoint.driver.gpus import Gpu, Sample
from entrypoint.script.script_folder import ScriptFolder
from trainbox.files.energy import with_energy
from trainbox.files.entries import step_of
from trainbox.folders.record_folder import METRICS

_EVERY_S = 10.0


class GpuRecord:
    """Appends the load of the GPUs to metrics.jsonl, and measures their energy.

    This is the `Telemetry` of a watch.
    """

    names: tuple[str, ...] = ("utilization_percent", "memory_used_mib", "energy_mj")

    def __init__(self, folder: ScriptFolder, gpus: Sequence[Gpu]) -> None:
        self._folder, self._gpus = folder, gpus
        self.metrics = folder.path / METRICS
        self._next_s = 0.0
        self._begin_j: float | None = None  # before the first sample
        self._newest_j = math.nan

    def take(self, sample: Sample) -> None:
        """Read the energy counters, and write an entry every 10 s."""

        def each(name: str) -> list[int | None]:
            values = [sample.of(gpu).get(name) for gpu in self._gpus]
            return [value if isinstance(value, int) else None for value in values]

        counters_mj = each("energy_mj")
        self._newest_j = sum(math.nan if mj is None else mj / 1000 for mj in counters_mj)
        if self._begin_j is None:
            self._begin_j = self._newest_j
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _EVERY_S
        self._folder.report(
            {
                "kind": "gpus",
                "step": self.step(),
                "gpu_utilization_percent_each": each("utilization_percent"),
                "gpu_memory_used_mib_each": each("memory_used_mib"),
            }
        )

    def step(self) -> int:
        """Return the newest step that the script has reported, or 0."""
        return step_of({"step": self._folder.newest("step")}) or 0

    def with_energy(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the manifest with the energy of a start, which ends here."""
        begin_j, self._begin_j = self._begin_j, self._newest_j
        return with_energy(manifest, math.nan if begin_j is None else begin_j, self._newest_j)
