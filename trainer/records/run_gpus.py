"""The GPUs of a run on all ranks: their names, their load, and the energy that they use."""

import contextlib
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from trainbox.errors import Stopped
from trainbox.files.energy import energy_row, with_energy
from trainbox.folders.record_folder import MANIFEST
from trainer.parallel.strategy import Strategy
from trainer.records.run_folder import RunFolder
from trainer.system.background import in_background

_READ_EVERY_S, _STALE_S = 1.0, 5.0
_FIRST_S, _NEXT_S = 10.0, 1.0  # the first answer takes longer: NVML is imported and initialized


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
    """The GPUs that all ranks of a training compute on. A training on the CPU has none."""

    def __init__(self, strategy: Strategy, folder: RunFolder) -> None:
        """Find the GPUs; all ranks must call this."""
        self._strategy, self._folder = strategy, folder
        own = strategy.own_gpus()
        self._reader = GpuReader([uuid for uuid, _ in own])
        self.all: list[RunGpu] = []
        if own:
            rows = [
                [platform.node(), reading.nvml_index, name, uuid]
                for reading, (uuid, name) in zip(self._reader.read(), own, strict=True)
            ]
            each = strategy.world.from_each(rows)
            self.all = [RunGpu(*gpu) for rank in each for gpu in rank]

    def close(self) -> None:
        self._reader.close()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Add the energy of the body to the run's manifest, unless the body fails.

        All ranks must call this.
        """
        if not self.all:
            yield
            return
        begin_j = self._joules()
        try:
            yield
        except Stopped:  # on all ranks
            self._add(begin_j)
            raise
        self._add(begin_j)

    def figures(self) -> dict[str, Any]:
        """Return the load of all GPUs in the last second; all ranks must call this.

        `gpu_memory_mib` is the largest peak of the tensors in memory.
        """
        if not self.all:
            return {}
        peaks_mib = self._strategy.peak_memory_mib()
        figures: dict[str, Any] = {
            "gpu_memory_mib": max(peaks_mib),
            "gpu_memory_mib_each": peaks_mib,
        }
        percent, used_mib, _ = self._gather(self._reader.newest())
        if known := [value for value in percent if value is not None]:
            figures["gpu_utilization_percent"] = statistics.fmean(known)
            figures["gpu_utilization_percent_each"] = percent
        if any(value is not None for value in used_mib):
            figures["gpu_memory_used_mib_each"] = used_mib
        return figures

    def rows(self) -> dict[str, str]:
        """Return the rows for the header of a training."""
        return {"gpus": f"\n{'':<11}".join(map(str, self.all))} if self.all else {}

    def summary(self) -> dict[str, str]:
        """Return the row for the end of a training."""
        manifest = self._folder.read_json(MANIFEST) if self.all else None
        return energy_row(manifest or {})

    def _joules(self) -> float:
        """Return the sum of the energy counters of all GPUs, or NaN if one cannot be read.

        All ranks must call this.
        """
        *_, joules = self._gather(self._reader.read())
        return sum(math.nan if each is None else each for each in joules)

    def _add(self, begin_j: float) -> None:
        """Add the energy since `begin_j` to the manifest. All ranks must call this."""
        end_j = self._joules()
        if self._folder.writes and (manifest := self._folder.read_json(MANIFEST)) is not None:
            self._folder.write_json(MANIFEST, with_energy(manifest, begin_j, end_j))

    def _gather(self, readings: list["GpuReading"]) -> tuple[list[float | None], ...]:
        """Return the utilisation in percent, the memory in MiB and the energy in J of each GPU.

        `readings` has the newest values of this rank's GPUs.
        """
        own, world = torch.tensor(readings, dtype=torch.float64), self._strategy.world
        rows = world.gather_rows(own.flatten()[None])
        columns = rows.reshape(-1, own.shape[1]).T.tolist()[1:]  # without the index
        return tuple([None if math.isnan(x) else x for x in column] for column in columns)


class GpuReading(NamedTuple):
    """The values of a GPU. A value that is not readable is NaN."""

    nvml_index: float = math.nan
    utilization_percent: float = math.nan
    memory_used_mib: float = math.nan
    energy_j: float = math.nan


class GpuReader:
    """Reads GPUs, by UUID, once a second in a thread: a call into a broken driver may hang forever.

    While a call hangs, all values are unknown and nobody waits.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = uuids
        self._asked = SimpleQueue[Future[None] | None]()
        self._answer: Future[None] | None = None  # of the last call of `read`
        self._ended: Future[None] | None = None  # of the thread
        self._newest, self._read_s = list[GpuReading](), -math.inf
        self._is_open = False

    def read(self) -> list[GpuReading]:
        """Return the values of now of each GPU."""
        if self._uuids and (self._answer is None or self._answer.done()):
            limit_s = _FIRST_S if self._ended is None else _NEXT_S
            self._answer = Future()
            self._asked.put(self._answer)
            if self._ended is None:
                self._ended = in_background(self._follow, "gpu-reader")
            with contextlib.suppress(TimeoutError):
                self._answer.result(limit_s)
                return self._newest
        return [GpuReading() for _ in self._uuids]

    def newest(self) -> list[GpuReading]:
        """Return the values of the last second, without waiting."""
        if time.monotonic() - self._read_s < _STALE_S:
            return self._newest
        return [GpuReading() for _ in self._uuids]

    def close(self) -> None:
        """Release the driver, unless a call hangs."""
        if self._ended is not None:
            self._asked.put(None)
            if self._answer is not None and self._answer.done():
                with contextlib.suppress(TimeoutError):
                    self._ended.result(_NEXT_S)

    def _follow(self) -> None:
        """Read once a second, and for each call of `read`, until `close`."""
        import pynvml

        answer: Future[None] | None = None
        while True:
            with contextlib.suppress(Empty):
                answer = self._asked.get(timeout=_READ_EVERY_S)
                if answer is None:
                    break
            self._newest, self._read_s = self._read_all(), time.monotonic()
            if answer is not None and not answer.done():
                answer.set_result(None)
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _read_all(self) -> list[GpuReading]:
        import pynvml

        if not self._is_open:
            with contextlib.suppress(pynvml.NVMLError):  # each call below will raise it
                pynvml.nvmlInit()
            self._is_open = True
        return [_reading(uuid) for uuid in self._uuids]


def _reading(uuid: str) -> GpuReading:
    import pynvml

    def value(read: Callable[[Any], float]) -> float:
        """Return NaN if the GPU or its driver does not have the value, or refuses it."""
        try:
            return float(read(pynvml.nvmlDeviceGetHandleByUUID(uuid)))
        except pynvml.NVMLError:
            return math.nan

    def index(handle: Any) -> int:
        with contextlib.suppress(pynvml.NVMLError):  # raised for a whole GPU
            handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return int(pynvml.nvmlDeviceGetIndex(handle))

    return GpuReading(
        value(index),
        value(lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        value(lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20),
        value(lambda handle: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000),
    )
