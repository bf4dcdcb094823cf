"""What the NVIDIA driver says: the only importer of pynvml."""

from dataclasses import dataclass

import pynvml

from entrypoint.gpus import Gpu


@dataclass(frozen=True)
class Detection:
    """What was found: the GPUs, the driver's version, and in `absent` or `broken` why there are none.

    `absent` is a host without an NVIDIA driver: training on the CPU is fine there. `broken` is a driver that is
    there and does not work: training on the CPU instead would hide it.
    """

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    absent: str | None = None
    broken: str | None = None


_REMEDIES = {
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was updated under a running kernel module: reboot the host",
    pynvml.NVML_ERROR_UNKNOWN: "the container may have lost its GPUs (a daemon reload does that): recreate it",
    pynvml.NVML_ERROR_NO_PERMISSION: "the device files are not readable for this user: check the container runtime",
}


def detect() -> Detection:
    """Ask the driver, once."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        return Detection(absent=f"no NVIDIA driver here (NVML: {error})")
    except pynvml.NVMLError as error:
        remedy = _REMEDIES.get(error.value, "see `nvidia-smi` on the host")
        return Detection(broken=f"the NVIDIA driver does not answer (NVML {error.value}: {error}): {remedy}")
    try:
        gpus = tuple(gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in _devices(index))
        return Detection(gpus, pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return Detection(broken=f"the NVIDIA driver failed while listing GPUs (NVML {error.value}: {error})")
    finally:
        pynvml.nvmlShutdown()


def _devices(index: int) -> list[Gpu]:
    """The GPU at `index`, or its MIG slices if it is cut into some."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        whole = _describe(handle, index)
        return _slices(handle, whole) if _mig_enabled(handle) else [whole]
    except pynvml.NVMLError as error:
        # Kept in the list, so that a plan that would use it is refused and indices do not shift.
        return [Gpu(index, f"unknown-{index}", "unknown", 0, fault=f"NVML {error.value}: {error}")]


def _slices(handle: object, whole: Gpu) -> list[Gpu]:
    slices: list[Gpu] = []
    for position in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, position)
        except pynvml.NVMLError_NotFound:
            continue  # a free place
        slices.append(_describe(mig, whole.index, len(slices), whole.uuid))
    return slices or [Gpu(whole.index, whole.uuid, whole.name, 0, fault="MIG mode is on and no slice is made")]


def _memory_mib(handle: object) -> int:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // 2**20
    except pynvml.NVMLError_NotSupported:
        return 0  # it shares the host's


def _describe(handle: object, index: int, mig_index: int | None = None, mig_parent: str | None = None) -> Gpu:
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_mib=_memory_mib(handle),
        mig_index=mig_index,
        mig_parent=mig_parent,
    )


def _mig_enabled(handle: object) -> bool:
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)
