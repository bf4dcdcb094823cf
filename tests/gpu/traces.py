"""Read the Chrome traces of torch's profiler, as values."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]


def kernels(events: Iterable[Event]) -> list[Event]:
    """Return the kernels that ran on the GPU."""
    return [event for event in events if event.get("cat") == "kernel"]


def device_events(events: Iterable[Event]) -> list[Event]:
    """Return all that ran on the GPU: kernels, copies and fills."""
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def copies_to_gpu(events: Iterable[Event], least_bytes: int = 0) -> list[Event]:
    """Return the copies from the host to the GPU of at least `least_bytes`."""
    return [
        event
        for event in events
        if event.get("cat") == "gpu_memcpy"
        and "HtoD" in event.get("name", "")
        and int(event.get("args", {}).get("bytes", 0)) >= least_bytes
    ]


def streams(events: Iterable[Event]) -> set[int]:
    return {int(event.get("args", {}).get("stream", -1)) for event in events}


def _spans(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Return the times (begin, end) in µs during which at least one event runs, in order."""
    merged: list[tuple[float, float]] = []
    for begin, length in sorted((float(e["ts"]), float(e["dur"])) for e in events):
        end = begin + length
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def busy_us(events: Iterable[Event]) -> float:
    """Return the µs during which at least one of the events runs."""
    return sum(end - begin for begin, end in _spans(events))


def overlap_us(some: Sequence[Event], others: Sequence[Event]) -> float:
    """Return the µs during which an event of each of the two lists runs."""
    total, left, right = 0.0, _spans(some), _spans(others)
    i = j = 0
    while i < len(left) and j < len(right):
        begin = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        total += max(0.0, end - begin)
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def summary(events: Sequence[Event], steps: int, least_bytes: int = 0) -> dict[str, Any]:
    """Return the figures of `steps` training steps."""
    computed, copied = kernels(events), copies_to_gpu(events, least_bytes)
    begin = min((float(e["ts"]) for e in computed), default=0.0)
    end = max((float(e["ts"]) + float(e["dur"]) for e in computed), default=0.0)
    return {
        "kernels_per_step": len(computed) / steps,
        "busy_share": busy_us(computed) / (end - begin) if end > begin else 0.0,
        "copies": len(copied),
        "copied_ms": busy_us(copied) / 1000,
        "overlap_share": overlap_us(copied, computed) / (busy_us(copied) or 1.0),
        "own_stream": bool(copied) and not (streams(copied) & streams(computed)),
        "kinds": sorted({event["name"] for event in copied}),
    }
