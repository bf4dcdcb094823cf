"""Read this process's GPUs from the NVIDIA driver, without ever blocking the training."""

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

_FIRST_S, _NEXT_S = 10.0, 1.0  # the first answer takes longer: NVML is imported and initialized


class Reading(NamedTuple):
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
        self._uuids, self._limit_s = uuids, _FIRST_S
        self._questions: SimpleQueue[Future[list[Reading]] | None] = SimpleQueue()
        self._answer: Future[list[Reading]] | None = None
        self._thread = threading.Thread(target=self._read_all, name="gpu-reader", daemon=True)
        if uuids:
            self._thread.start()

    def read(self) -> list[Reading]:
        """Return the newest values of each GPU."""
        nothing = [Reading() for _ in self._uuids]
        if not self._uuids or self._is_hanging():
            return nothing
        self._answer = Future()
        self._questions.put(self._answer)
        try:
            return self._answer.result(self._limit_s)
        except TimeoutError:
            return nothing
        finally:
            self._limit_s = _NEXT_S

    def close(self) -> None:
        """End the thread. If a call hangs, do not wait: the thread ends when it returns."""
        self._questions.put(None)
        if self._thread.is_alive() and not self._is_hanging():
            self._thread.join(_NEXT_S)

    def _is_hanging(self) -> bool:
        return self._answer is not None and not self._answer.done()

    def _read_all(self) -> None:
        import pynvml

        # Without a driver, each call raises NVMLError.
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
        while (answer := self._questions.get()) is not None:
            answer.set_result([_reading(uuid) for uuid in self._uuids])
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _reading(uuid: str) -> Reading:
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

    return Reading(
        value(index),
        value(lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        value(lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20),
        value(lambda handle: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000),
    )
