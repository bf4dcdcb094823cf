"""Values that were read from the driver."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = int | str | tuple[int, ...]


@dataclass(frozen=True)
class Unread:
    """A value that could not be read, with NVML's error number and text."""

    code: int
    text: str

    def __str__(self) -> str:
        return f"NVML {self.code}: {self.text}"


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
