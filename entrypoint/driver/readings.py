"""What was read from the driver, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = int | str | tuple[int, ...]


@dataclass(frozen=True)
class Unread:
    """A value that could not be had: NVML's error number and text."""

    code: int
    text: str

    def __str__(self) -> str:
        return f"NVML {self.code}: {self.text}"


Readings = Mapping[str, Value | Unread]


@dataclass(frozen=True)
class Sample:
    """One look at some GPUs, by UUID.

    `time_s` is of a clock that never jumps; `xids` are (uuid, Xid) since the look before; `fault`
    says why nothing was read.
    """

    time_s: float
    gpus: Mapping[str, Readings] = field(default_factory=dict)
    xids: tuple[tuple[str, int], ...] = ()
    driver: Readings = field(default_factory=dict)
    fault: Unread | None = None
