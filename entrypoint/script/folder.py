"""The run folder of a script: its lock, config.json, manifest.json and metrics.jsonl."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoint.script.target import Target
from trainbox.contract.entries import EntryReader, is_of_script
from trainbox.contract.errors import WrongUse
from trainbox.contract.files import append_line, read_object, replacing
from trainbox.contract.storage import storage_failure
from trainbox.contract.streams import message

CONFIG, MANIFEST, METRICS, LOGS = "config.json", "manifest.json", "metrics.jsonl", "logs"
KIND = "script"
_TAIL_BYTES = 2**16


class ScriptFolder:
    """The folder of one run of a script. Only the first node `writes` the records."""

    def __init__(self, path: Path, target: Target, writes: bool) -> None:
        """Make the folder, lock it, and write config.json if the run is new.

        Raises:
            WrongUse: the folder is one of another script or task, or another process uses it.
            StorageFailure: the folder or a file in it cannot be written.
        """
        self.path, self.writes = path, writes
        self._lock: int | None = None
        self._has_lost = False  # whether an entry could not be appended
        try:
            (path / LOGS).mkdir(parents=True, exist_ok=True)
            if not writes:
                return
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _take(self._lock, path)
            self._check_config(target)
            self._end_last_line()
        except OSError as error:
            raise storage_failure(path, error) from error

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append one entry to metrics.jsonl, in one write, as the script may append as well.

        A script keeps training on a full disk. So a failure is only printed, the first one.
        """
        timed = {"time_unix_s": round(time.time(), 3), **entry}
        try:
            append_line(self.path / METRICS, json.dumps(timed))
        except OSError as error:
            if not self._has_lost:
                self._has_lost = True
                message(f"entries are lost: {storage_failure(self.path / METRICS, error)}")

    def newest(self, name: str) -> Any:
        """Return the newest value `name` that the script has reported, or None."""
        entries = EntryReader.at_end(self.path / METRICS, _TAIL_BYTES).read()
        found = [entry[name] for entry in entries if name in entry and is_of_script(entry)]
        return found[-1] if found else None

    def read(self, name: str) -> dict[str, Any]:
        """Return the object in the file `name`; empty if it is missing or damaged."""
        try:
            return read_object(self.path / name)
        except (OSError, ValueError):
            return {}

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace the file `name` atomically.

        Raises:
            StorageFailure: the file cannot be written.
        """
        if not self.writes:
            return
        try:
            with replacing(self.path / name) as file:
                file.write(f"{json.dumps(value, indent=2)}\n".encode())
        except OSError as error:
            raise storage_failure(self.path / name, error) from error

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _end_last_line(self) -> None:
        """End a line of metrics.jsonl that a killed start has left in parts."""
        with contextlib.suppress(FileNotFoundError), (self.path / METRICS).open("r+b") as file:
            if (
                file.seek(0, os.SEEK_END)
                and file.seek(-1, os.SEEK_END) >= 0
                and file.read() != b"\n"
            ):
                file.write(b"\n")

    def _check_config(self, target: Target) -> None:
        """Write config.json of a new run, and compare that of an old one with `target`."""
        if not (self.path / CONFIG).exists():
            others = [name for name in (MANIFEST, METRICS) if (self.path / name).exists()]
            if self.path.name == target.run_name() and others == [METRICS]:
                others = []  # trainbox.metrics() wrote it: the script was started without us
            if others:
                raise WrongUse(
                    f"{self.path} is not a run, and its {' and '.join(others)} would be changed: "
                    "choose another --run name, or move the files away"
                )
            self.write(
                CONFIG,
                {
                    "kind": KIND,
                    "script": target.name,
                    "is_module": target.is_module,
                    "arguments": list(target.arguments),
                },
            )
            return
        config = self.read(CONFIG)
        if not config:
            raise WrongUse(
                f"{self.path / CONFIG} is damaged: choose another --run name, or remove the file "
                f"and {MANIFEST} to record this run again"
            )
        if config.get("kind") != KIND:
            raise WrongUse(
                f"{self.path} is a run of a task, not of a script: choose another --run name"
            )
        if (config.get("script"), config.get("is_module")) != (target.name, target.is_module):
            raise WrongUse(
                f"{self.path} is a run of {config.get('script')}, not of {target.name}: choose "
                "another --run name"
            )


def _take(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WrongUse(
            f"another process uses {path}: wait until it ends, or choose another folder with "
            "--run NAME"
        ) from None
