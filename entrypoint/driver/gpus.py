"""GPUs and what the driver reports of them as values, and how users select GPUs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainbox.errors import DeviceMissing, WrongUse

Value = int | str | tuple[int, ...]
NO_ANSWER = 10  # NVML's TIMEOUT, for a driver that does not answer
NOT_NVML = -1  # the code of a value that could not be read for another reason than an error of NVML
# Values that the driver reports only for a whole GPU, and not for each of its MIG slices.
_OF_WHOLE_GPUS = {"utilization_percent", "memory_used_mib", "power_w", "energy_mj"}


@dataclass(frozen=True)
class Unread:
    """A value that could not be read, with NVML's error number, or NOT_NVML, and a text."""

    code: int
    text: str

    def __str__(self) -> str:
        return self.text if self.code == NOT_NVML else f"NVML {self.code}: {self.text}"


Readings = Mapping[str, Value | Unread]


@dataclass(frozen=True)
class Sample:
    """The readings of some GPUs at one time, by UUID.

    Attributes:
        time_s: seconds of the monotonic clock.
        xids: (uuid, Xid) of each event since the previous sample.
        fault: why nothing was read.
    """

    time_s: float
    gpus: Mapping[str, Readings] = field(default_factory=dict)
    xids: tuple[tuple[str, int], ...] = ()
    driver: Readings = field(default_factory=dict)
    fault: Unread | None = None

    def of(self, gpu: "Gpu") -> Readings:
        """Return the readings of a whole GPU; for a MIG slice, only what is true of the slice."""
        readings = self.gpus.get(gpu.whole_uuid, {})
        if gpu.mig_parent is None:
            return readings
        unshared = Unread(3, "slices share this value of their GPU")  # as if not supported
        return {**readings, **dict.fromkeys(readings.keys() & _OF_WHOLE_GPUS, unshared)}


@dataclass(frozen=True)
class Gpu:
    """One device that a process can compute on: a whole GPU, or a MIG slice of one.

    Attributes:
        index: NVML's index, in the order of the PCI bus and of nvidia-smi.
        uuid: the UUID of the GPU or of the slice.
        memory_mib: the total memory in MiB, 0 if it is shared with the host or hidden.
        mig_index: the position of a slice on its GPU.
        mig_parent: the UUID of the GPU that a slice is part of.
        capability: the compute capability (major, minor), None if the driver does not report it.
        fault: why a GPU that the driver lists cannot be used.
    """

    index: int
    uuid: str
    name: str
    memory_mib: int
    mig_index: int | None = None
    mig_parent: str | None = None
    fault: Unread | None = None
    capability: tuple[int, int] | None = None

    @property
    def whole_uuid(self) -> str:
        """The UUID of the whole GPU, of which the driver reads most values."""
        return self.mig_parent or self.uuid

    @property
    def label(self) -> str:
        """The short name that users write: `2`, or `2:1` for the second slice of GPU 2."""
        return f"{self.index}" if self.mig_index is None else f"{self.index}:{self.mig_index}"


@dataclass(frozen=True)
class Detection:
    """The GPUs and the driver's version, or why no GPU was found.

    Attributes:
        absent: set on a host without an NVIDIA driver, where training on the CPU is fine.
        broken: set if the driver is installed but does not work. Training on the CPU would hide it.
        code: NVML's error number if the driver is broken.
    """

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    absent: str | None = None
    broken: str | None = None
    code: int = 0


def labels(gpus: Sequence[Gpu]) -> str:
    return " ".join(gpu.label for gpu in gpus) or "none"


def select(gpus: Sequence[Gpu], ids: str, source: str) -> tuple[Gpu, ...]:
    """Return the GPUs that `ids` lists, in its order.

    Args:
        gpus: the GPUs to select from.
        ids: indices, slices as `0:1`, UUIDs or unique beginnings of UUIDs, separated by commas.
        source: the option or variable that `ids` came from, for messages.

    Raises:
        WrongUse: an entry is malformed, repeated or ambiguous. torch would train on fewer
            GPUs without an error.
        DeviceMissing: an entry is well-formed, but this machine has no such GPU.
    """
    chosen: list[Gpu] = []
    for position, entry in enumerate(ids.split(","), start=1):
        gpu = _find(gpus, entry.strip(), f"{source}={ids}", position)
        if gpu in chosen:
            raise WrongUse(f"{source}={ids} names GPU {gpu.label} twice: name each GPU once")
        chosen.append(gpu)
    return tuple(chosen)


def _find(gpus: Sequence[Gpu], entry: str, given: str, position: int) -> Gpu:
    if not entry:
        raise WrongUse(
            f"{given}: entry {position} is empty: write indices or UUIDs with single commas, as in "
            "0,2"
        )
    if entry.startswith(("GPU-", "MIG-")):
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        if len(matches) > 1:
            raise WrongUse(
                f"{given}: {entry} matches {len(matches)} GPUs ({labels(matches)}): write more of "
                "the UUID"
            )
    elif all(part.isascii() and part.isdigit() for part in entry.split(":", 1)):
        matches = [gpu for gpu in gpus if entry in (gpu.label, f"{gpu.index}")]
        if len(matches) > 1:
            raise WrongUse(
                f"{given}: GPU {entry} is divided into MIG slices ({labels(matches)}): name one "
                f"slice, as in {matches[0].label}"
            )
    else:
        raise WrongUse(
            f"{given}: '{entry}' is not a GPU: write indices or UUIDs separated by commas, as in "
            "0,2 or GPU-8f3a"
        )
    if not matches:
        raise DeviceMissing(
            f"{given}: GPU {entry} was not found: choose from the GPUs found ({labels(gpus)})"
        )
    return matches[0]


def hides_all(cuda_visible_devices: str | None) -> bool:
    """Return whether this value of CUDA_VISIBLE_DEVICES selects no GPU."""
    value = cuda_visible_devices
    return value is not None and value.strip() in ("", "-1", "NoDevFiles", "none", "void")


def visible_gpus(gpus: Sequence[Gpu], cuda_visible_devices: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects.

    If it is unset, all GPUs are visible. If it is empty, `-1` or SLURM's `NoDevFiles`, none is.
    Integers are NVML's indices, which is why the plan also sets CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Raises:
        WrongUse, DeviceMissing: as `select`.
    """
    if cuda_visible_devices is None:
        return tuple(gpus)
    if hides_all(cuda_visible_devices):
        return ()
    return select(gpus, cuda_visible_devices, "CUDA_VISIBLE_DEVICES")
