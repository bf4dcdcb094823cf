"""The load and the energy of the GPUs of a script, which does not read them itself."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from entrypoint.driver.gpus import Gpu, Sample
from entrypoint.script.folder import ScriptFolder
from trainbox.contract.energy import Energy, earlier_joules
from trainbox.contract.entries import step_of
from trainbox.contract.record_folder import METRICS

_EVERY_S = 10.0


class GpuRecord:
    """Appends the readings of the GPUs to metrics.jsonl, and adds up their energy.

    This is the `Telemetry` of a watch.
    """

    names: tuple[str, ...] = ("utilization_percent", "memory_used_mib", "energy_mj")

    def __init__(
        self, folder: ScriptFolder, gpus: Sequence[Gpu], manifest: Mapping[str, Any]
    ) -> None:
        self._folder, self._gpus = folder, gpus
        self.metrics = folder.path / METRICS
        self._next_s = 0.0
        self._energy = Energy(earlier_joules(manifest))

    def take(self, sample: Sample) -> None:
        """Add the energy since the previous sample, and write an entry every 10 s."""

        def each(name: str) -> list[int | None]:
            values = [sample.of(gpu).get(name) for gpu in self._gpus]
            return [value if isinstance(value, int) else None for value in values]

        counters = zip(self._gpus, each("energy_mj"), strict=True)
        self._energy.read({gpu.uuid: math.nan if mj is None else mj / 1000 for gpu, mj in counters})
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _EVERY_S
        kwh = self._energy.recorded()["kwh"]
        self._folder.report(
            {
                "kind": "gpus",
                "step": self.step(),
                "gpu_utilization_percent_each": each("utilization_percent"),
                "gpu_memory_used_mib_each": each("memory_used_mib"),
                **({} if kwh is None else {"energy_kwh": kwh}),
            }
        )

    def step(self) -> int:
        """Return the newest step that the script has reported, or 0."""
        return step_of({"step": self._folder.newest("step")}) or 0

    def energy(self) -> dict[str, Any]:
        """Return the energy of the run for its manifest, with that of the earlier starts."""
        if not self._energy.used_j:  # no sample was taken
            self._energy.read({gpu.uuid: math.nan for gpu in self._gpus})
        return self._energy.recorded()
