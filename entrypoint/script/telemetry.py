"""The load and the energy of the GPUs of a script, which does not read them itself."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from entrypoint.driver.gpus import Gpu
from entrypoint.driver.readings import Sample
from entrypoint.script.folder import ScriptFolder

NAMES = ("utilization_percent", "memory_used_mib", "energy_mj")
_EVERY_S = 10.0
_MJ_PER_KWH = 3.6e9


class GpuRecord:
    """Appends the readings of the GPUs to metrics.jsonl, and adds up their energy."""

    def __init__(self, folder: ScriptFolder, gpus: Sequence[Gpu]) -> None:
        self._folder, self._gpus = folder, gpus
        self._next_s = 0.0
        self._newest: dict[str, int] = {}
        # None for a GPU whose energy is not known in whole.
        self._used_mj: dict[str, int | None] = {}

    def take(self, sample: Sample) -> None:
        """Add the energy since the previous sample, and write an entry every 10 s."""
        each = [self._readings(sample, gpu) for gpu in self._gpus]
        for gpu, readings in zip(self._gpus, each, strict=True):
            self._add(gpu.uuid, readings["energy_mj"])
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _EVERY_S
        entry: dict[str, Any] = {
            "kind": "gpus",
            "step": self.step(),
            "gpu_utilization_percent_each": [one["utilization_percent"] for one in each],
            "gpu_memory_used_mib_each": [one["memory_used_mib"] for one in each],
        }
        if (kwh := _kwh(self._used_mj.values())) is not None:
            entry["energy_kwh"] = kwh
        self._folder.append(entry)

    def step(self) -> int:
        """Return the newest step that the script has reported, or 0."""
        step = self._folder.newest("step")
        return step if type(step) is int else 0

    def energy(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the energy of the run for its manifest, with that of the earlier starts."""
        used = dict(self._used_mj) or {gpu.uuid: None for gpu in self._gpus}
        each = {gpu["uuid"]: gpu["kwh"] for gpu in before.get("gpus", [])}
        for uuid, used_mj in used.items():
            earlier = each.get(uuid, 0.0)
            own = None if used_mj is None else used_mj / _MJ_PER_KWH
            each[uuid] = None if own is None or earlier is None else earlier + own
        known = [kwh for kwh in each.values() if kwh is not None]
        return {
            "kwh": sum(known) if known and len(known) == len(each) else None,
            "gpus": [{"uuid": uuid, "kwh": kwh} for uuid, kwh in each.items()],
        }

    def _readings(self, sample: Sample, gpu: Gpu) -> dict[str, int | None]:
        found = sample.gpus.get(gpu.uuid, {}) if gpu.mig_parent is None else {}
        values = {name: found.get(name) for name in NAMES}
        return {name: value if isinstance(value, int) else None for name, value in values.items()}

    def _add(self, uuid: str, energy_mj: int | None) -> None:
        before = self._newest.get(uuid)
        if energy_mj is None or (before is not None and energy_mj < before):
            self._used_mj[uuid] = None  # not readable, or the counter was reset
        elif before is None:
            self._used_mj.setdefault(uuid, 0)
        elif (used := self._used_mj.get(uuid)) is not None:
            self._used_mj[uuid] = used + energy_mj - before
        if energy_mj is not None:
            self._newest[uuid] = energy_mj


def _kwh(used_mj: Any) -> float | None:
    values = list(used_mj)
    return None if not values or None in values else sum(values) / _MJ_PER_KWH
