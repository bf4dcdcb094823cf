"""What the entrypoint sees of the GPUs while this process trains: it appends a JSON object a line to a file that it names."""

import functools
import json
import os
from pathlib import Path
from typing import Any

EVENT = ("time_unix_s", "gpu", "uuid", "check", "result", "read", "do")


class HardwareEvents:
    """The events in the file at `path`, each given once; none without a path, or while there is no file."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._seen_bytes = path, 0

    def new(self) -> list[dict[str, Any]]:
        """What EVENT names of those since the last call. A line without its end waits; a damaged one is passed over."""
        if self._path is None:
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(self._seen_bytes)
                whole, end, _half_written = file.read().rpartition(b"\n")
        except OSError:  # the entrypoint has not begun it, or has removed it
            return []
        self._seen_bytes += len(whole + end)
        return [event for line in whole.split(b"\n") if (event := _event(line)) is not None]


def hardware_events() -> HardwareEvents:
    """Those of the file named in the environment, the same object at each call for the same file.

    A sweep's worker trains many times: what one of its runs was given is not given to the next.
    """
    return _events_in(os.environ.get("TRAINBOX_HEALTH_EVENTS", ""))


@functools.cache
def _events_in(path: str) -> HardwareEvents:
    return HardwareEvents(Path(path) if path else None)


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not event.keys() >= set(EVENT):
        return None
    if not isinstance(event["time_unix_s"], int | float) or not isinstance(event["check"], str):
        return None
    return {name: event[name] for name in EVENT}
