"""What the entrypoint sees of the GPUs while this process trains: it appends a JSON object a line
to a file that it names.
"""

import contextlib
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

EVENT = ("time_unix_s", "gpu", "uuid", "check", "result", "read", "do")


class HardwareEvents:
    """The events in the file at `path`, each given once; none without a path, or while there is no
    file.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._seen_bytes = path, 0

    def new(self) -> list[dict[str, Any]]:
        """What EVENT names of those since the last call.

        A line without its end waits; a damaged one is passed over.
        """
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


def note_run(metrics: Path) -> None:
    """Say beside the file of events which metrics.jsonl they belong to, for `record_left_over`."""
    if path := os.environ.get("TRAINBOX_HEALTH_EVENTS"):
        with contextlib.suppress(OSError):
            Path(f"{path}.run").write_bytes(os.fsencode(metrics.absolute()))


def record_left_over(events: Path) -> None:
    """Put the events that a training which has ended did not take over into its metrics.jsonl, at
    its last step.
    """
    try:
        metrics = Path(os.fsdecode(Path(f"{events}.run").read_bytes()))
        lines = metrics.read_bytes().split(b"\n")
        with metrics.open("ab") as file:
            entries = [json.loads(line) for line in lines[:-1] if line]
            known = [
                {name: entry.get(name) for name in EVENT}
                for entry in entries
                if entry.get("kind") == "health"
            ]
            last = max(
                entries, key=lambda entry: int(entry["step"]), default={"step": 0, "epoch": 0}
            )
            place = {"kind": "health", "step": last["step"], "epoch": last["epoch"]}
            left = [event for event in HardwareEvents(events).new() if event not in known]
            torn = b"\n" if lines[-1] else b""  # by the kill; readers pass over such a line
            file.write(
                torn * bool(left)
                + b"".join(json.dumps(place | event).encode() + b"\n" for event in left)
            )
    except (OSError, ValueError, KeyError, TypeError):
        # it had not begun, or its place is gone: the entrypoint has told them on the terminal
        return


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


if __name__ == "__main__":
    record_left_over(Path(sys.argv[1]))
