"""Read this process's GPUs from the NVIDIA driver, without ever blocking the training."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

Reading = dict[str, float]  # by the names of `READINGS`; without the values that are not readable

READINGS = ("index", "utilization_percent", "memory_used_mib", "energy_j")
_FIRST_S, _NEXT_S = 10.0, 1.0  # the first answer takes longer: NVML is imported and initialized


class GpuReader:
    """Reads GPUs, by UUID, in a thread, because a call into a broken driver may hang forever.

    While a call hangs, `read` finds nothing and returns at once.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = tuple(uuids)
        self._questions: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[list[Reading]] = SimpleQueue()
        self._waiting, self._limit_s = False, _FIRST_S
        self._thread = threading.Thread(target=self._answer, name="gpu-reader", daemon=True)
        if self._uuids:
            self._thread.start()

    def read(self) -> list[Reading]:
        """Return the newest values of each GPU."""
        nothing: list[Reading] = [{} for _ in self._uuids]
        if not self._uuids:
            return nothing
        try:
            if self._waiting:
                self._answers.get_nowait()  # too old
            self._questions.put(True)
            self._waiting = True
            found = self._answers.get(timeout=self._limit_s)
        except Empty:
            return nothing
        finally:
            self._limit_s = _NEXT_S
        self._waiting = False
        return found

    def close(self) -> None:
        """End the thread. If a call hangs, do not wait long: the thread ends when it returns."""
        self._questions.put(False)
        if self._uuids and not self._waiting:
            self._thread.join(_NEXT_S)

    def _answer(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            while self._questions.get():
                self._answers.put([{} for _ in self._uuids])
            return
        while self._questions.get():
            self._answers.put([_reading(uuid) for uuid in self._uuids])
        pynvml.nvmlShutdown()


def _reading(uuid: str) -> Reading:
    import pynvml

    def index(handle: Any) -> int:
        with contextlib.suppress(pynvml.NVMLError):  # raised for a whole GPU
            handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return int(pynvml.nvmlDeviceGetIndex(handle))

    values: tuple[Callable[[Any], float], ...] = (
        index,
        lambda handle: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20,
        lambda handle: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
    )
    found: Reading = {}
    for name, value in zip(READINGS, values, strict=True):
        # A GPU or its driver may not have the value, or refuse it.
        try:
            found[name] = value(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        except pynvml.NVMLError:
            continue
    return found
