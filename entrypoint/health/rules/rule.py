"""Define what a health rule is, the result of judging one, and values of several samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entrypoint.driver.gpus import Sample, Unread
from entrypoint.health.limits import Limits
from entrypoint.health.verdict import Mode, Result

Values = Mapping[str, Any]
SLOWDOWN_WINDOW = 10  # samples
WINDOW_S = 60.0
# Bits for hardware slowdown, thermal slowdown and power brake. Idle and the power cap are normal.
HARDWARE_SLOWDOWN = 0x08 | 0x40 | 0x80
SOFTWARE_SLOWDOWN = 0x20  # by the driver, above the working temperature
_SECOND_S, _MINUTE_S = 1.0, 60.0
# Values derived from several samples, and the reading that each is derived from.
DERIVED_FROM = {
    "nvlink_errors_risen": "nvlink_errors",
    "slowdown": "clocks_event_reasons",
    "pcie_replays_per_minute": "pcie_replays",
    "nvlink_crc_per_second": "nvlink_crc",
}


@dataclass(frozen=True)
class Judgement:
    """The result of a rule: texts for the reading and the limit, and an action of `ACTIONS`."""

    result: Result
    read: str
    limit: str = ""
    action: str = ""


# Most rules run in all modes except LIVE and WATCH, which read only a few values. A rule that needs
# several samples does not run in the gate, which takes only one. A rule that would find the
# processes of the training does not run in the monitor.
USUAL = frozenset({Mode.GATE, Mode.CHECK, Mode.DEEP, Mode.MONITOR})
WATCHED = USUAL | {Mode.WATCH}


@dataclass(frozen=True)
class Rule:
    """A health rule for one GPU.

    Attributes:
        check: the name of the rule.
        reads: the names of the driver's values; if one cannot be read, `judge` is not called.
        judge: gets all values by name, and the limits.
        source: the origin of the rule.
        also: the names of more values, each of which may be `Unread`.
        modes: the modes in which the rule runs.
        ends_a_run: whether a CRITICAL during a training (Mode.WATCH) makes it save and stop.
        may_recover: whether it stops only if the next reading is CRITICAL as well.
        unknown_closes: whether no training starts while a value in `reads` cannot be read. This is
            for damage that nothing else would show. Sandboxes and virtual GPUs fail to read many
            other values on healthy hardware.
    """

    check: str
    reads: tuple[str, ...]
    judge: Callable[[Values, Limits], Judgement]
    source: str = "NVIDIA Health Validation"
    also: tuple[str, ...] = ()
    modes: frozenset[Mode] = USUAL
    ends_a_run: bool = False
    may_recover: bool = False
    unknown_closes: bool = False


def at_threshold(
    count: float, threshold: float, read: str, limit: str, bad: Result, action: str
) -> Judgement:
    """Return `bad` if the count is at the threshold or above, else PASS."""
    if count >= threshold:
        return Judgement(bad, read, limit, action)
    return Judgement(Result.PASS, read, limit)


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


def window(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that rates and durations need: the last minute, and at least ten."""
    begin_s = samples[-1].time_s - WINDOW_S
    first = next(number for number, sample in enumerate(samples) if sample.time_s >= begin_s)
    return list(samples[max(0, min(first, len(samples) - SLOWDOWN_WINDOW)) :])


def _slow_samples(series: Sequence[tuple[float, Any]]) -> tuple[int, int, int, int, float]:
    """Return numbers about the newest ten samples of a GPU's reasons for lower clocks.

    They are: the newest bits of reasons, the number of samples that hardware slowed, the number of
    samples that anything slowed, the number of all samples, and their time span in seconds.
    """
    recent = series[-SLOWDOWN_WINDOW:]
    hard = sum(bool(reasons & HARDWARE_SLOWDOWN) for _, reasons in recent)
    slow = sum(bool(reasons & (HARDWARE_SLOWDOWN | SOFTWARE_SLOWDOWN)) for _, reasons in recent)
    return recent[-1][1], hard, slow, len(recent), recent[-1][0] - recent[0][0]


def _per_minute(series: Sequence[tuple[float, Any]]) -> float:
    return round(_rise(series, lambda value: value, _MINUTE_S), 1)


def _worst_per_second(series: Sequence[tuple[float, Any]]) -> float:
    links, recent = range(len(series[-1][1])), series[-SLOWDOWN_WINDOW:]
    rises = (
        _rise(recent, lambda value, link=link: value[link], _SECOND_S)  # type: ignore[misc]
        for link in links
    )
    return round(max(rises), 1)


def _worst_rise(series: Sequence[tuple[float, Any]]) -> int:
    """Return the largest rise of any link over the last ten samples."""
    recent = series[-SLOWDOWN_WINDOW:]
    return int(
        max(0, *(last - first for first, last in zip(recent[0][1], recent[-1][1], strict=False)))
    )


def _rise(series: Sequence[tuple[float, Any]], of: Callable[[Any], int], unit_s: float) -> float:
    """Return the rise per `unit_s` over the samples.

    A series that is shorter than the unit counts as one unit, so that a single error is not
    multiplied. After a reset of the GPU and of its counters, the rise is 0.
    """
    (begin_s, first), (end_s, last) = series[0], series[-1]
    return max(0, of(last) - of(first)) * unit_s / max(unit_s, end_s - begin_s)


_DERIVE: dict[str, Callable[[Sequence[tuple[float, Any]]], Any]] = {
    "slowdown": _slow_samples,
    "pcie_replays_per_minute": _per_minute,
    "nvlink_crc_per_second": _worst_per_second,
    "nvlink_errors_risen": _worst_rise,
}
