"""Read the hardware events that the entrypoint appends to a file while this process trains.

Each line of the file is a JSON object. Internal.HEALTH_EVENTS has its path.
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbox.errors import StorageFailure
from trainbox.files.entries import EntryReader
from trainbox.files.regular_files import append_line
from trainbox.processes.environment import Internal
from trainer.records.jsonl import read_entries

if TYPE_CHECKING:
    from trainer.records.event_file import EventFile

_EVENT = ("time_unix_s", "gpu", "uuid", "check", "result", "read", "do")


def new_events(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the events since the last call that are not among `entries` of metrics.jsonl.

    An incomplete last line is read by a later call. Damaged lines are skipped. Without a file, the
    result is empty.
    """
    path = os.environ.get(Internal.HEALTH_EVENTS)
    return _not_in(entries, _reader(path)) if path else []


@functools.cache  # a worker of a sweep trains many times, and reads each event once
def _reader(path: str) -> EntryReader:
    return EntryReader(Path(path))


def _not_in(entries: Iterable[Mapping[str, Any]], reader: EntryReader) -> list[dict[str, Any]]:
    known = [_event(entry) for entry in entries if entry.get("kind") == "health"]
    return [
        _event(line)
        for line in reader.read()
        if line.keys() >= set(_EVENT)
        and isinstance(line["time_unix_s"], int | float)
        and isinstance(line["check"], str)
        and _event(line) not in known
    ]


def _event(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry.get(name) for name in _EVENT}


def show_events(file: "EventFile", events: Iterable[Mapping[str, Any]], step: int) -> None:
    """Write what is known of `events` to TensorBoard, which shows one text per check and step."""
    by_check: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        by_check.setdefault(event.get("check"), []).append(event)
    for check, found in by_check.items():
        text = "\n\n".join(map(_text, found))
        file.text(f"health/{check}", text, step, found[-1].get("time_unix_s"))


def _text(event: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {event[name]}" for name in _EVENT[1:] if event.get(name) is not None)


def note_run(metrics: Path) -> None:
    """Write the path of metrics.jsonl next to the events file, for `record_left_over`."""
    if path := os.environ.get(Internal.HEALTH_EVENTS):
        with contextlib.suppress(OSError):
            Path(f"{path}.run").write_bytes(os.fsencode(metrics.absolute()))


def record_left_over(events: Path) -> None:
    """Append the events that an ended training did not record to its metrics.jsonl.

    They are recorded at the last step of the training.
    """
    # Without metrics.jsonl, the training had not started to record, or its folder was removed. The
    # entrypoint has already printed the events.
    with contextlib.suppress(OSError, StorageFailure):
        metrics = Path(os.fsdecode(Path(f"{events}.run").read_bytes()))
        entries = read_entries(metrics)
        last = max(entries, key=lambda entry: int(entry["step"]), default={"step": 0, "epoch": 0})
        position = {"kind": "health", "step": last["step"], "epoch": last.get("epoch")}
        left = _not_in(entries, EntryReader(events)) if metrics.exists() else []
        for event in left:
            append_line(metrics, json.dumps(position | event))


if __name__ == "__main__":
    record_left_over(Path(sys.argv[1]))
