"""Readers of one value of a GPU, or of the driver, through NVML.

If a GPU or driver does not have the value, the reader raises NVMLError.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

from entrypoint.driver.gpus import Value


def _field(handle: Any, number: int) -> int:
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [number])
    # A driver that does not know the field answers with an invalid argument.
    if value.nvmlReturn == pynvml.NVML_ERROR_INVALID_ARGUMENT:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    kinds = {
        pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    }
    return int(getattr(value.value, kinds.get(value.valueType, "uiVal")))


def _sram_threshold_exceeded(handle: Any) -> int:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    pynvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return int(status.bThresholdExceeded)


def _retired_pages(handle: Any) -> int:
    causes = (
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    return sum(len(pynvml.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes)


def _clocks_event_reasons(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
        # Before driver 535 the function had this name.
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _links(read: Callable[[int], int]) -> Iterator[int | None]:
    """Yield the result of `read` for each NVLink, and None for a link that the model does not use.

    After the last link, drivers answer with an invalid argument.
    """
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            yield int(read(link))
        except pynvml.NVMLError_InvalidArgument:
            return
        except pynvml.NVMLError_NotSupported:
            yield None


def _each_link(read: Callable[[int], int], unused: int) -> tuple[int, ...]:
    """Return the result of `read` for each NVLink, `unused` for a link that is not used."""
    values = [*_links(read)]
    if all(value is None for value in values):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return tuple(unused if value is None else value for value in values)


def _nvlink_active(handle: Any) -> tuple[int, ...]:
    """Return for each link 1 if it is up, 0 if it is down, and -1 if this model does not use it."""
    return _each_link(lambda link: pynvml.nvmlDeviceGetNvLinkState(handle, link), -1)


def _nvlink_switch(handle: Any) -> int:
    """Return 1 if a link leads to an NVSwitch, else 0. The other end of a dead link is unknown."""
    kinds = _links(lambda link: pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
    return int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH in kinds)  # reads up to the first such link


def _nvlink_counters(handle: Any, *counters: int) -> tuple[int, ...]:
    return _each_link(
        lambda link: sum(
            pynvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter) for counter in counters
        ),
        0,
    )


def _fabric(handle: Any) -> tuple[int, ...]:
    """Return (state, status, health mask, health summary); 0 for a summary that is not known."""
    info = pynvml.c_nvmlGpuFabricInfo_v3_t()
    try:
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except (pynvml.NVMLError_ArgumentVersionMismatch, pynvml.NVMLError_InvalidArgument):
        # Drivers before 580 do not have a summary.
        info = pynvml.c_nvmlGpuFabricInfo_v2_t()
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    summary = getattr(info, "healthSummary", 0)
    return int(info.state), int(info.status), int(info.healthMask), int(summary)


def _memory_used_mib(handle: Any) -> int:
    """Return the memory in use. Older drivers add what the driver reserves, some hundred MiB."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_ArgumentVersionMismatch):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.used) // 2**20


def _processes(handle: Any) -> tuple[int, ...]:
    return tuple(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))


def _ecc_errors(kind: int) -> Callable[[Any], int]:
    counter = pynvml.NVML_VOLATILE_ECC
    return lambda handle: int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter))


def _threshold(kind: int) -> Callable[[Any], int]:
    return lambda handle: int(pynvml.nvmlDeviceGetTemperatureThreshold(handle, kind))


READERS: dict[str, Callable[[Any], Value]] = {
    "recovery_action": lambda h: _field(h, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
    "ecc_corrected": _ecc_errors(pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    "ecc_uncorrected": _ecc_errors(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    "ecc_mode": lambda h: tuple(map(int, pynvml.nvmlDeviceGetEccMode(h))),
    "ecc_default": lambda h: int(pynvml.nvmlDeviceGetDefaultEccMode(h)[0]),
    "sram_threshold_exceeded": _sram_threshold_exceeded,
    "remapped_rows": lambda h: tuple(map(int, pynvml.nvmlDeviceGetRemappedRows(h))),
    "retired_pages": _retired_pages,
    "retired_pages_pending": lambda h: int(pynvml.nvmlDeviceGetRetiredPagesPendingStatus(h)),
    "clocks_event_reasons": _clocks_event_reasons,
    "temperature_c": lambda h: int(pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU)),
    "slowdown_c": _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
    "working_c": _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX),
    "shutdown_c": _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
    # Newer GPUs report temperatures and limits as degrees below the slowdown.
    "margin_c": lambda h: int(pynvml.nvmlDeviceGetMarginTemperature(h)),
    "slowdown_margin_c": lambda h: _field(h, pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT),
    "shutdown_margin_c": lambda h: _field(h, pynvml.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT),
    "sm_clock_mhz": lambda h: int(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM)),
    "memory_clock_mhz": lambda h: int(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_MEM)),
    "pcie_generation": lambda h: int(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(h)),
    "pcie_max_generation": lambda h: int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(h)),
    "pcie_width": lambda h: int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(h)),
    "pcie_max_width": lambda h: int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(h)),
    "pcie_replays": lambda h: int(pynvml.nvmlDeviceGetPcieReplayCounter(h)),
    "nvlink_active": _nvlink_active,
    "nvlink_switch": _nvlink_switch,
    "nvlink_errors": lambda h: _nvlink_counters(
        h, pynvml.NVML_NVLINK_ERROR_DL_REPLAY, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY
    ),
    "nvlink_crc": lambda h: _nvlink_counters(
        h, pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT, pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA
    ),
    "fabric": _fabric,
    "inforom": lambda h: str(pynvml.nvmlDeviceGetInforomImageVersion(h)),
    "persistence": lambda h: int(pynvml.nvmlDeviceGetPersistenceMode(h)),
    "compute_mode": lambda h: int(pynvml.nvmlDeviceGetComputeMode(h)),
    "mig": lambda h: tuple(map(int, pynvml.nvmlDeviceGetMigMode(h))),
    "name": lambda h: str(pynvml.nvmlDeviceGetName(h)),
    "vbios": lambda h: str(pynvml.nvmlDeviceGetVbiosVersion(h)),
    "processes": _processes,
    "utilization_percent": lambda h: int(pynvml.nvmlDeviceGetUtilizationRates(h).gpu),
    "memory_used_mib": _memory_used_mib,
    "power_w": lambda h: int(pynvml.nvmlDeviceGetPowerUsage(h)) // 1000,
    "energy_mj": lambda h: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(h)),
}
DRIVER_READERS: dict[str, Callable[[], Value]] = {
    "driver_version": lambda: str(pynvml.nvmlSystemGetDriverVersion()),
    "cuda": lambda: int(pynvml.nvmlSystemGetCudaDriverVersion_v2()),
}
