"""Derive the values that need several samples, such as rates."""

from collections.abc import Callable, Sequence
from typing import Any

from entrypoint.driver.readings import Sample, Unread

SLOWDOWN_WINDOW = 10  # samples
# Bits for hardware slowdown, thermal slowdown and power brake. Idle and the power cap are normal.
_HARDWARE_SLOWDOWN = 0x08 | 0x40 | 0x80
_MINUTE_S = 60.0
# Values derived from several samples, and the reading that each is derived from.
DERIVED_FROM = {
    "nvlink_errors_risen": "nvlink_errors",
    "slowdown": "clocks_event_reasons",
    "pcie_replays_per_minute": "pcie_replays",
    "nvlink_crc_per_second": "nvlink_crc",
}


def derived(samples: Sequence[Sample], uuid: str) -> dict[str, Any]:
    """Return the values that need several samples.

    A value is unread if the newest sample does not have its reading.
    """
    values: dict[str, Any] = {}
    for name, origin in DERIVED_FROM.items():
        series = [
            (sample.time_s, value)
            for sample in samples
            if (value := sample.gpus.get(uuid, {}).get(origin)) is not None
        ]
        if not series:
            continue
        newest = series[-1][1]
        read = [(time_s, value) for time_s, value in series if not isinstance(value, Unread)]
        values[name] = newest if isinstance(newest, Unread) else _DERIVE[name](read)
    return values


def _slow_samples(series: Sequence[tuple[float, Any]]) -> tuple[int, int, int, float]:
    """Return the newest reasons, the slow samples, all samples, and their time span in seconds."""
    recent = series[-SLOWDOWN_WINDOW:]
    slow = sum(bool(reasons & _HARDWARE_SLOWDOWN) for _, reasons in recent)
    return recent[-1][1], slow, len(recent), recent[-1][0] - recent[0][0]


def _per_minute(series: Sequence[tuple[float, Any]]) -> float:
    return round(_rise(series, lambda value: value) * _MINUTE_S, 1)


def _worst_per_second(series: Sequence[tuple[float, Any]]) -> float:
    links = range(len(series[-1][1]))
    return round(max(_rise(series, lambda value, link=link: value[link]) for link in links), 1)  # type: ignore[misc]


def _worst_rise(series: Sequence[tuple[float, Any]]) -> int:
    """Return the largest rise of any link over the window."""
    return int(
        max(0, *(last - first for first, last in zip(series[0][1], series[-1][1], strict=False)))
    )


def _rise(series: Sequence[tuple[float, Any]], of: Callable[[Any], int]) -> float:
    """Return the rise per second over the window.

    After a reset of the GPU and of its counters, the rise is 0.
    """
    (begin_s, first), (end_s, last) = series[0], series[-1]
    return max(0, of(last) - of(first)) / (end_s - begin_s) if end_s > begin_s else 0.0


_DERIVE: dict[str, Callable[[Sequence[tuple[float, Any]]], Any]] = {
    "slowdown": _slow_samples,
    "pcie_replays_per_minute": _per_minute,
    "nvlink_crc_per_second": _worst_per_second,
    "nvlink_errors_risen": _worst_rise,
}
