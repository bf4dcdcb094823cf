"""The limits of the health rules, their sources, and the file that overrides them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from trainbox.errors import WrongUse
from trainbox.files.parsing import parse_toml


@dataclass(frozen=True)
class Limits:
    """The limits of the rules with their sources. A TOML file can override each field."""

    # errors since the driver was loaded; more is CRITICAL
    ecc_uncorrected: Annotated[int, "NVIDIA Health Validation"] = 0
    # this number or more is WARN
    remapped_rows: Annotated[int, "NVIDIA, row remapping: a GPU has 512 spare rows"] = 512
    # WARN or CRITICAL: the result if a row remap is pending
    remap_pending: Annotated[str, "Trainbox; other tools fail it"] = "WARN"
    # this number or more is CRITICAL
    retired_pages: Annotated[int, "NVIDIA, dynamic page retirement: at most 64 pages"] = 63
    # slow samples of the last 10; this number or more is CRITICAL
    slowdown_samples: Annotated[int, "Trainbox"] = 6
    # °C below the device's shutdown; CRITICAL from there
    shutdown_margin_c: Annotated[int, "the device, and Trainbox's margin"] = 3
    # more is WARN
    pcie_replays_per_minute: Annotated[float, "DCGM"] = 8
    # WARN or CRITICAL: the result if a link is down on this GPU but not on the others in use
    nvlink_inactive: Annotated[str, "NVIDIA Health Validation"] = "CRITICAL"
    # new replays and recoveries of a link; this number or more is CRITICAL
    nvlink_errors: Annotated[int, "DCGM"] = 1
    # this number or more is CRITICAL
    nvlink_crc_per_second: Annotated[float, "DCGM"] = 100
    # on a GPU before the start; more is WARN
    memory_in_use_mib: Annotated[int, "Trainbox"] = 1024
    # less is WARN; Docker's default /dev/shm has 64 in all
    shm_mib_per_process: Annotated[int, "Trainbox"] = 64
    # less is WARN
    memory_mib_per_process: Annotated[int, "Trainbox"] = 2048
    # free where runs are written; less is WARN
    disk_mib: Annotated[int, "Trainbox"] = 2048
    # speed relative to the median of similar GPUs or pairs; less is WARN
    deep_slowest_of_median: Annotated[float, "Trainbox"] = 0.8

    def overridden(self) -> dict[str, dict[str, Any]]:
        """Return the `value` and the `usual` value of each limit that differs from its default."""
        usual = vars(Limits())
        return {
            name: {"value": value, "usual": usual[name]}
            for name, value in vars(self).items()
            if value != usual[name]
        }


SOURCES: dict[str, str] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Limits, include_extras=True).items()
}
_MOST = 1e15  # of any limit
# Of the limits that a value reaches from below. Outside, a rule would always or never apply.
_RANGES = {
    "remapped_rows": (1, 512),
    "retired_pages": (1, 64),
    "slowdown_samples": (1, 10),
    "nvlink_errors": (1, 1e9),
    "nvlink_crc_per_second": (1, 1e9),
    "deep_slowest_of_median": (0, 1),
}
_RESULTS = ("remap_pending", "nvlink_inactive")


def read_limits(file: Path | None) -> Limits:
    """Return the default limits, some replaced by `file` (TOML: `remapped_rows = 100`).

    Raises:
        WrongUse: the file is missing or not TOML, or has an unknown limit or a wrong value.
    """
    if file is None:
        return Limits()
    try:
        # A FIFO would block, and a device may never end. Compose mounts /dev/null by default.
        if file.exists() and not (file.is_file() or _is_null(file)):
            raise ValueError("not a file")
        given = parse_toml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WrongUse(
            f"--health-limits {file} cannot be read ({getattr(error, 'strerror', None) or error}): "
            "give a TOML file with lines such as remapped_rows = 100"
        ) from error
    usual = vars(Limits())
    for name, value in given.items():
        if name not in usual:
            raise WrongUse(
                f"--health-limits {file}: unknown limit {name!r}: use one of {', '.join(usual)}"
            )
        if name in _RESULTS:
            if value not in ("WARN", "CRITICAL"):
                raise WrongUse(
                    f"--health-limits {file}: {name} = {value!r} is not a result: set it to "
                    '"WARN" or "CRITICAL"'
                )
        elif (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST
        ):
            raise WrongUse(
                f"--health-limits {file}: {name} = {value!r} is not a number from 0 to {_MOST:g}: "
                f"set it as in {name} = {usual[name]}"
            )
        elif name in _RANGES and not _RANGES[name][0] <= value <= _RANGES[name][1]:
            least, most = _RANGES[name]
            when = "always" if (value < least) != (name == "deep_slowest_of_median") else "never"
            raise WrongUse(
                f"--health-limits {file}: {name} = {value!r} would {when} be reached: set "
                f"it to a number from {least:g} to {most:g}"
            )
    return Limits(**given)


def _is_null(file: Path) -> bool:
    return file.is_char_device() and file.stat().st_rdev == Path(os.devnull).stat().st_rdev
