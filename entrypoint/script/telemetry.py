"""The load and the energy of the GPUs of a script, which does not read them itself."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from entrypoint.driver.gpus import Gpu
from entrypoint.driver.readings import Sample
from entrypoint.script.folder import ScriptFolder
from trainbox.contract.energy import Energy, earlier_joules

NAMES = ("utilization_percent", "memory_used_mib", "energy_mj")
_EVERY_S = 10.0


class GpuRecord:
    """Appends the readings of the GPUs to metrics.jsonl, and adds up their energy."""

    def __init__(
        self, folder: ScriptFolder, gpus: Sequence[Gpu], manifest: Mapping[str, Any]
    ) -> None:
        self._folder, self._gpus = folder, gpus
        self._next_s = 0.0
        self._energy = Energy(earlier_joules(manifest))

    def take(self, sample: Sample) -> None:
        """Add the energy since the previous sample, and write an entry every 10 s."""
        each = [self._readings(sample, gpu) for gpu in self._gpus]
        counters_mj = {
            gpu.uuid: readings["energy_mj"] for gpu, readings in zip(self._gpus, each, strict=True)
        }
        self._energy.read(
            {uuid: math.nan if mj is None else mj / 1000 for uuid, mj in counters_mj.items()}
        )
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _EVERY_S
        entry: dict[str, Any] = {
            "kind": "gpus",
            "step": self.step(),
            "gpu_utilization_percent_each": [one["utilization_percent"] for one in each],
            "gpu_memory_used_mib_each": [one["memory_used_mib"] for one in each],
        }
        if (kwh := self._energy.recorded()["kwh"]) is not None:
            entry["energy_kwh"] = kwh
        self._folder.append(entry)

    def step(self) -> int:
        """Return the newest step that the script has reported, or 0."""
        step = self._folder.newest("step")
        return step if type(step) is int else 0

    def energy(self) -> dict[str, Any]:
        """Return the energy of the run for its manifest, with that of the earlier starts."""
        if not self._energy.used_j:  # no sample was taken
            self._energy.read({gpu.uuid: math.nan for gpu in self._gpus})
        return self._energy.recorded()

    def _readings(self, sample: Sample, gpu: Gpu) -> dict[str, int | None]:
        found = sample.gpus.get(gpu.uuid, {}) if gpu.mig_parent is None else {}
        values = {name: found.get(name) for name in NAMES}
        return {name: value if isinstance(value, int) else None for name, value in values.items()}
