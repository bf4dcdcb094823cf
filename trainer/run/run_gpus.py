"""The GPUs of a run on all ranks: their names, their load, and the energy that they use."""

import contextlib
import math
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trainbox.contract.energy import Energy, earlier_joules, shown_kwh
from trainbox.contract.errors import Preempted, StorageFailure
from trainbox.contract.record_folder import MANIFEST
from trainer.parallel.strategy import Strategy
from trainer.run.gpu_reader import GpuReader
from trainer.run.run_folder import RunFolder
from trainer.run.run_record import read_manifest

_WRITTEN_EVERY_S = 60.0


@dataclass(frozen=True)
class RunGpu:
    """A GPU of the run. `nvml_index` is NaN if the driver does not answer."""

    host: str
    nvml_index: float
    name: str
    uuid: str

    def __str__(self) -> str:
        index = "" if math.isnan(self.nvml_index) else f"{self.nvml_index:.0f} "
        return f"{index}{self.name} {self.uuid[:12]} on {self.host}"


class RunGpus:
    """The GPUs that all ranks of a training compute on. A training on the CPU has none.

    The energy of earlier starts is read from the run's manifest, and the sum is written there.
    """

    def __init__(self, strategy: Strategy, folder: RunFolder) -> None:
        """Find the GPUs; all ranks must call this."""
        self._strategy, self._folder = strategy, folder
        own = strategy.own_gpus()
        self._reader = GpuReader([uuid for uuid, _ in own])
        self._written_s = time.monotonic()
        self.all: list[RunGpu] = []
        if own:
            rows = [
                [platform.node(), reading.nvml_index, name, uuid]
                for reading, (uuid, name) in zip(self._reader.read(), own, strict=True)
            ]
            each = strategy.world.from_each(rows)
            self.all = [RunGpu(*gpu) for rank in each for gpu in rank]
        # A resume refuses a damaged manifest.
        self._energy = Energy(earlier_joules(read_manifest(folder) or {}) if own else {})

    def close(self) -> None:
        self._reader.close()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the energy of the body, and add it to the run's manifest.

        All ranks must call this.
        """
        if not self.all:
            yield
            return
        self.joules()
        try:
            yield
            self.joules()
        except Preempted:  # on all ranks
            self.joules()
            raise
        finally:
            self._write()

    def figures(self) -> dict[str, Any]:
        """Return the load of all GPUs for metrics.jsonl; all ranks must call this.

        `gpu_memory_mib` is the largest peak of the tensors in memory.
        """
        if not self.all:
            return {}
        peaks_mib = self._strategy.peak_memory_mib()
        figures: dict[str, Any] = {
            "gpu_memory_mib": max(peaks_mib),
            "gpu_memory_mib_each": peaks_mib,
        }
        percent, used_mib, _ = self._read()
        if known := [value for value in percent if value is not None]:
            figures["gpu_utilization_percent"] = statistics.fmean(known)
            figures["gpu_utilization_percent_each"] = percent
        if any(value is not None for value in used_mib):
            figures["gpu_memory_used_mib_each"] = used_mib
        if (kwh := self.kwh()) is not None:
            figures["energy_kwh"] = kwh
        if time.monotonic() - self._written_s > _WRITTEN_EVERY_S:
            self._write()
        return figures

    def joules(self) -> float | None:
        """Return the energy of all GPUs since `measured`, or None if one was not measured.

        All ranks must call this.
        """
        if not self.all:
            return None
        self._read()
        total = sum(self._energy.used_j.values())
        return None if math.isnan(total) else total

    def kwh(self) -> float | None:
        """Return the energy of the run up to the last reading, or None if it was not measured."""
        kwh: float | None = self._energy.recorded()["kwh"]
        return kwh

    def rows(self) -> dict[str, str]:
        """Return the rows for the header of a training."""
        return {"gpus": f"\n{'':<11}".join(map(str, self.all))} if self.all else {}

    def summary(self) -> dict[str, str]:
        """Return the row for the end of a training."""
        if not self.all:
            return {}
        energy = self._energy.recorded()
        each = ", ".join(f"{gpu['uuid'][:12]} {shown_kwh(gpu['kwh'])}" for gpu in energy["gpus"])
        total = shown_kwh(energy["kwh"])
        return {"energy": f"{total} ({each})" if len(energy["gpus"]) > 1 else total}

    def _read(self) -> tuple[list[float | None], ...]:
        """Return the utilisation in percent, the memory in MiB and the energy in J of each GPU."""
        own, world = torch.tensor(self._reader.read(), dtype=torch.float64), self._strategy.world
        rows = world.gather_rows(own.flatten()[None], [1] * world.world_size)
        columns = rows.reshape(-1, own.shape[1]).T.tolist()[1:]  # without the index
        counters_j = dict(zip((gpu.uuid for gpu in self.all), columns[-1], strict=True))
        self._energy.read(counters_j)
        return tuple([None if math.isnan(x) else x for x in column] for column in columns)

    def _write(self) -> None:
        """Write the energy into the manifest, if this rank writes the run's files."""
        self._written_s = time.monotonic()
        if self._folder.writes and (manifest := self._folder.read_json(MANIFEST)) is not None:
            manifest["energy"] = self._energy.recorded()
            # An error of the training matters more.
            with contextlib.suppress(StorageFailure):
                self._folder.write_json(MANIFEST, manifest)
