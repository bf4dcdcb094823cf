"""Read the hardware events that the entrypoint appends to a file while this process trains.

Each line of the file is a JSON object. Internal.HEALTH_EVENTS has its path.
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainbox.contract.entries import EntryReader
from trainbox.contract.internal import Internal

EVENT = ("time_unix_s", "gpu", "uuid", "check", "result", "read", "do")


class HardwareEvents:
    """The events in the file at `path`, each returned once.

    Without a file, `new` returns an empty list.
    """

    def __init__(self, path: Path | None) -> None:
        self._reader = EntryReader(path) if path else None

    def new(self) -> list[dict[str, Any]]:
        """Return the events since the last call, with the keys of EVENT.

        An incomplete last line is read by a later call. Damaged lines are skipped.
        """
        if self._reader is None:
            return []
        return [event for entry in self._reader.read() if (event := _event(entry)) is not None]


def hardware_events() -> HardwareEvents:
    """Return the events of the file that the environment names.

    Each call for the same file returns the same object. A worker of a sweep trains many times, and
    its next run must not record the events of the previous run again.
    """
    return _events_in(os.environ.get(Internal.HEALTH_EVENTS, ""))


@functools.cache
def _events_in(path: str) -> HardwareEvents:
    return HardwareEvents(Path(path) if path else None)


def note_run(metrics: Path) -> None:
    """Write the path of metrics.jsonl next to the events file, for `record_left_over`."""
    if path := os.environ.get(Internal.HEALTH_EVENTS):
        with contextlib.suppress(OSError):
            Path(f"{path}.run").write_bytes(os.fsencode(metrics.absolute()))


def record_left_over(events: Path) -> None:
    """Append the events that an ended training did not record to its metrics.jsonl.

    They are recorded at the last step of the training.
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
            position = {"kind": "health", "step": last["step"], "epoch": last["epoch"]}
            left = [event for event in HardwareEvents(events).new() if event not in known]
            # End a line that the kill left incomplete. Readers skip it.
            if left and lines[-1]:
                file.write(b"\n")
            file.write(b"".join(json.dumps(position | event).encode() + b"\n" for event in left))
    except (OSError, ValueError, KeyError, TypeError):
        # The training had not started to record, or its folder was removed. The entrypoint has
        # already printed the events.
        return


def event_text(event: Mapping[str, Any]) -> str:
    """Return what is known of an event, besides its time, as TensorBoard shows it."""
    return ", ".join(f"{name} {event[name]}" for name in EVENT[1:] if event.get(name) is not None)


def _event(event: Mapping[str, Any]) -> dict[str, Any] | None:
    if not event.keys() >= set(EVENT):
        return None
    if not isinstance(event["time_unix_s"], int | float) or not isinstance(event["check"], str):
        return None
    return {name: event[name] for name in EVENT}


if __name__ == "__main__":
    record_left_over(Path(sys.argv[1]))
