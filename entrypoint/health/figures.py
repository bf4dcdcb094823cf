"""The figures of a GPU: what the screen, --json and Prometheus show of its readings."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from entrypoint.driver.gpus import Gpu, Readings, Unread


@dataclass(frozen=True)
class Figure:
    """A figure of a GPU, and its metric for Prometheus.

    Attributes:
        name: the name of the figure in --json.
        metric: the name of the metric, without `trainbox_gpu_`.
        text: the description of the metric.
        factor: converts the figure to Prometheus' base unit.
        counts: whether the figure counts since the driver was loaded.
        kind: a label that distinguishes figures of the same metric.
        reading: the driver's value that the figure is computed from; by default `name`.
        of: computes the figure from this value.
    """

    name: str
    metric: str
    text: str
    factor: float = 1
    counts: bool = False
    kind: str = ""
    reading: str = ""
    of: Callable[[Any], Any] = lambda value: value


_BUSY = "Share of the time in which a program computed on the GPU"
_ECC, _ROWS = (
    ("ecc_errors", "Memory errors"),
    ("remapped_rows", "Memory rows remapped after errors"),
)
FIGURES = (
    Figure("temperature_c", "temperature_celsius", "The GPU's temperature"),
    Figure("utilization_percent", "utilization_ratio", _BUSY, 0.01),
    Figure("memory_used_mib", "memory_used_bytes", "Memory in use on the GPU", 2**20),
    Figure("power_w", "power_watts", "Power that the GPU draws"),
    Figure("sm_clock_mhz", "sm_clock_hertz", "Clock of the multiprocessors", 10**6),
    Figure("memory_clock_mhz", "memory_clock_hertz", "Clock of the memory", 10**6),
    Figure("pcie_generation", "pcie_generation", "Generation of the PCIe link now"),
    Figure("pcie_width", "pcie_width_lanes", "Lanes of the PCIe link now"),
    Figure("energy_mj", "energy_joules", "Energy used", 0.001, True),
    Figure("ecc_corrected", *_ECC, 1, True, "corrected"),
    Figure("ecc_uncorrected", *_ECC, 1, True, "uncorrected"),
    Figure("remapped_rows_corrected", *_ROWS, 1, True, "corrected", "remapped_rows", itemgetter(0)),
    Figure(
        "remapped_rows_uncorrected", *_ROWS, 1, True, "uncorrected", "remapped_rows", itemgetter(1)
    ),
    Figure("pcie_replays", "pcie_replays", "Replays of the PCIe link", 1, True),
    Figure(
        "nvlink_errors", "nvlink_errors", "Replays and recoveries of the NVLinks", 1, True, of=sum
    ),
    Figure(
        "nvlink_crc_errors",
        "nvlink_crc_errors",
        "CRC errors of the NVLinks",
        counts=True,
        reading="nvlink_crc",
        of=sum,
    ),
)
# The values that are read for the figures, and values that only describe the GPU.
READ_FOR_FIGURES = ("name", "vbios", *(figure.reading or figure.name for figure in FIGURES))


def description(gpu: Gpu, readings: Readings) -> dict[str, Any]:
    """Return the properties of a GPU and its figures, except what could not be read."""
    found = {name: v for name, v in readings.items() if not isinstance(v, Unread)}
    figures = {
        figure.name: figure.of(found[figure.reading or figure.name])
        for figure in FIGURES
        if (figure.reading or figure.name) in found
    }
    return {
        "gpu": gpu.label,
        "uuid": gpu.uuid,
        **({"mig_parent": gpu.mig_parent} if gpu.mig_parent else {}),
        "name": gpu.name,
        "memory_mib": gpu.memory_mib,
        **{name: found[name] for name in ("vbios",) if name in found},
        **figures,
    }
