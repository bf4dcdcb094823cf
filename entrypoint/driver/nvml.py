"""Readings from the NVIDIA driver through NVML.

A call may hang, so `entrypoint.driver.process` runs this module in a process of its own.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pynvml

from entrypoint.driver.gpus import NOT_NVML, Detection, Gpu, Readings, Sample, Unread, Value
from entrypoint.driver.readers import DRIVER_READERS, READERS

RETRIED_AFTER_S = 600.0  # for a reading that crashed or hung; the driver may be repaired
_REMEDIES = {
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was updated under "
    "a running kernel module: reboot the host",
    pynvml.NVML_ERROR_UNKNOWN: "the container may have lost its GPUs (a daemon reload does "
    "that): recreate it",
    pynvml.NVML_ERROR_NO_PERMISSION: "the device files are not readable for this user: check the "
    "container runtime",
}


class Session:
    """NVML in this process, with an event set that collects Xids after the first sample."""

    def __init__(
        self, left_out: Collection[str] = (), begins: Callable[[str], None] = lambda _name: None
    ) -> None:
        """Start without NVML, which the first question initializes.

        Readings named in `left_out` are made from RETRIED_AFTER_S on. `begins` is called with the
        name of each reading before it is made, and with "" after the last one of a GPU.
        """
        self._left_out, self._begins = left_out, begins
        self._retried_s = time.monotonic() + RETRIED_AFTER_S
        self._initialized = False
        self._events: Any = None
        self._registered: dict[str, Unread | None] = {}

    def detect(self) -> Detection:
        """Return the GPUs that the driver lists, or why it lists none."""
        try:
            self._init()
        except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
            return Detection(absent=f"no NVIDIA driver here (NVML: {error})")
        except pynvml.NVMLError as error:
            remedy = _REMEDIES.get(error.value, "see `nvidia-smi` on the host")
            return Detection(
                broken=f"the NVIDIA driver does not answer (NVML {error.value}: {error}): {remedy}",
                code=error.value,
            )
        try:
            gpus = tuple(
                gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in _devices(index)
            )
            version = _try(pynvml.nvmlSystemGetDriverVersion)
            return Detection(gpus, None if isinstance(version, Unread) else version)
        except pynvml.NVMLError as error:
            self._end()
            return Detection(
                broken=f"the NVIDIA driver failed while listing GPUs (NVML {error.value}: {error})",
                code=error.value,
            )

    def sample(self, uuids: Sequence[str], names: Sequence[str], events: bool = False) -> Sample:
        """Read the values `names` (keys of `READERS`) from each GPU.

        With `events`, the sample also has the Xids since the last one.
        """
        now_s = time.monotonic()
        try:
            self._init()
            driver = {name: _try(read) for name, read in DRIVER_READERS.items()}
            # If the container has lost its GPUs, this call fails.
            pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            # The next sample initializes NVML again.
            self._end()
            return Sample(now_s, fault=_unread(error))
        gpus = {uuid: self._read_gpu(uuid, names, events) for uuid in uuids}
        return Sample(now_s, gpus, self._new_xids(uuids) if events else (), driver)

    def xids(self, uuids: Sequence[str]) -> Sample:
        """Return a sample with the Xids since the last call and no other readings.

        The watch calls it in a second process, where a slow reading cannot delay an Xid.
        """
        try:
            self._init()
        except pynvml.NVMLError as error:
            return Sample(time.monotonic(), fault=_unread(error))
        gpus = {uuid: {"handle": 0, "events": self._listening(uuid)} for uuid in uuids}
        return Sample(time.monotonic(), gpus, self._new_xids(uuids))

    def _listening(self, uuid: str) -> int | Unread:
        """Register for the Xids of a GPU, and return 0 or why this failed.

        If the GPU could not be found, the next call tries again.
        """
        if uuid not in self._registered:
            handle = _try(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
            if isinstance(handle, Unread):
                return handle
            self._registered[uuid] = self._register(handle)
        return self._registered[uuid] or 0

    def _read_gpu(self, uuid: str, names: Sequence[str], events: bool) -> Readings:
        handle = _try(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
        if isinstance(handle, Unread):
            return dict.fromkeys(("handle", *names), handle)
        readings: dict[str, Value | Unread] = {"handle": 0}
        for name in names:
            if name in self._left_out and time.monotonic() < self._retried_s:
                readings[name] = Unread(NOT_NVML, "left out: an earlier call crashed or hung")
                continue
            self._begins(name)
            readings[name] = _try(lambda name=name: READERS[name](handle))  # type: ignore[misc]
        self._begins("")
        if events:
            readings["events"] = self._listening(uuid)
        return readings

    def _register(self, handle: Any) -> Unread | None:
        try:
            if self._events is None:
                self._events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(
                handle, pynvml.nvmlEventTypeXidCriticalError, self._events
            )
        except pynvml.NVMLError as error:
            return _unread(error)
        return None

    def _new_xids(self, uuids: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """Return the Xids that wait in the event set.

        For a lost GPU this is an error, which is ignored here: its handle reports the loss.
        """
        found: list[tuple[str, int]] = []
        with contextlib.suppress(pynvml.NVMLError, ValueError):
            while self._events is not None:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                found.append((pynvml.nvmlDeviceGetUUID(event.device), int(event.eventData)))
        return tuple(xid for xid in found if xid[0] in uuids)

    def _init(self) -> None:
        if not self._initialized:
            pynvml.nvmlInit()
            self._initialized = True

    def _end(self) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            if self._initialized:
                pynvml.nvmlShutdown()
        self._initialized, self._events, self._registered = False, None, {}


def _unread(error: pynvml.NVMLError) -> Unread:
    return Unread(error.value, str(error))


def _try(read: Callable[[], Any]) -> Any:
    """Return the result of `read`, or the error that it raises as a value."""
    try:
        return read()
    except pynvml.NVMLError as error:
        return _unread(error)
    except ValueError as error:
        # pynvml decodes texts as UTF-8.
        return Unread(NOT_NVML, f"the driver's answer is not a text ({error})")


# ---- The GPUs, and MIG slices of them ----

# The errors of a value that the device does not have, that its driver does not know, that this
# process may not read, or that is not a text. In a container, a GPU in MIG mode hides its memory.
_HIDDEN = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    NOT_NVML,
)


def _devices(index: int) -> list[Gpu]:
    """Return the GPU at `index`, or its MIG slices if MIG mode is on."""
    found = _try(lambda: _usable(index))
    if isinstance(found, Unread):
        # The GPU stays in the list, so that a plan that would use it fails and indices do not
        # shift.
        return [Gpu(index, f"unknown-{index}", "unknown", 0, fault=found)]
    devices: list[Gpu] = found
    return devices


def _usable(index: int) -> list[Gpu]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    whole = _describe(handle, index)
    mode = _shown(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0])
    if mode == pynvml.NVML_DEVICE_MIG_DISABLE:
        return [whole]
    # If the mode is hidden, the slices that this process can use decide.
    if slices := _slices(handle, whole):
        return slices
    if mode is None:
        return [whole]
    without_slice = Unread(NOT_NVML, "MIG mode is on without a slice")
    return [Gpu(whole.index, whole.uuid, whole.name, 0, fault=without_slice)]


def _slices(handle: object, whole: Gpu) -> list[Gpu]:
    """Return the MIG slices that this process may use."""
    slices: list[Gpu] = []
    for position in range(_shown(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
        try:
            mig = _shown(
                lambda at=position: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, at)  # type: ignore[misc]
            )
        except pynvml.NVMLError_NotFound:
            continue  # no slice at this position
        if mig is not None:
            found = _describe(mig, whole.index, len(slices), whole.uuid)
            slices.append(replace(found, capability=whole.capability))
    return slices


def _shown(read: Callable[[], Any]) -> Any:
    """Return the result of `read`, or None if the device hides it.

    Raises:
        NVMLError: the read failed in another way.
    """
    value = _try(read)
    if not isinstance(value, Unread):
        return value
    if value.code in _HIDDEN:
        return None
    raise pynvml.NVMLError(value.code)


def _describe(
    handle: object, index: int, mig_index: int | None = None, mig_parent: str | None = None
) -> Gpu:
    memory = _shown(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=_shown(lambda: pynvml.nvmlDeviceGetName(handle)) or "unknown",
        memory_mib=int(memory or 0) // 2**20,
        mig_index=mig_index,
        mig_parent=mig_parent,
        capability=_capability(handle),
    )


def _capability(handle: object) -> tuple[int, int] | None:
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return None  # the rules then do not judge it
    return major, minor
