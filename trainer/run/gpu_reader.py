"""Read this process's GPUs from the NVIDIA driver, without ever blocking the training."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.system.background import in_background

if TYPE_CHECKING:
    from concurrent.futures import Future

_FIRST_S, _NEXT_S = 10.0, 1.0  # the first answer takes longer: NVML is imported and initialized


class GpuReading(NamedTuple):
    """The values of a GPU. A value that is not readable is NaN."""

    nvml_index: float = math.nan
    utilization_percent: float = math.nan
    memory_used_mib: float = math.nan
    energy_j: float = math.nan


class GpuReader:
    """Reads GPUs, by UUID, in a thread, because a call into a broken driver may hang forever.

    While a call hangs, `read` finds nothing and returns at once.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = uuids
        self._answer: Future[list[GpuReading]] | None = None  # of the last call
        self._is_open = False

    def read(self) -> list[GpuReading]:
        """Return the newest values of each GPU."""
        if self._uuids and (self._answer is None or self._answer.done()):
            limit_s = _FIRST_S if self._answer is None else _NEXT_S
            self._answer = in_background(self._read_all, "gpu-reader")
            with contextlib.suppress(TimeoutError):
                return self._answer.result(limit_s)
        return [GpuReading() for _ in self._uuids]

    def close(self) -> None:
        """Release the driver, unless a call hangs."""
        if self._answer is not None and self._answer.done():
            import pynvml

            with contextlib.suppress(TimeoutError, pynvml.NVMLError):
                in_background(pynvml.nvmlShutdown, "gpu-reader").result(_NEXT_S)

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
