"""Values that were read from the driver."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = int | str | tuple[int, ...]
NO_ANSWER = 10  # NVML's TIMEOUT, for a driver that does not answer
NOT_NVML = -1  # the code of a value that could not be read for another reason than an error of NVML


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
