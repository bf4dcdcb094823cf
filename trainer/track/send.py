"""Send the rows of runs to a tracker in order, once or as they appear.

With each run, the tracker stores a marker of the rows that it has. A resume removes the last rows
of a run and records others. So the marker has the digests of some first parts of the run, and the
rows after the longest part that is still the same are sent.
"""

import hashlib
import importlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainbox.contract.errors import NetworkFailure, WrongUse
from trainbox.contract.record_folder import MANIFEST, METRICS
from trainer.run.jsonl import read_entries
from trainer.system.signals import handle_stop_signals
from trainer.track.runs import EntryRow, Run, read_run, row, runs_in

_LOOK_EVERY_S = 5.0
# A marker has the digests of the run without this many of its last rows. So for each row that a
# resume removes, at most three rows before it are sent again.
_LAST_ROWS = (0, *(4**power for power in range(9)))


class TrackedRun(Protocol):
    """One run in a tracker.

    Attributes:
        sent: The marker of the rows that the tracker has, or an empty text.
    """

    sent: str

    def send(self, rows: Sequence[EntryRow], sent: str) -> None:
        """Add rows, and then store the marker `sent`."""

    def close(self) -> None:
        """End the sends, of which there was one, and wait until everything is stored."""


class Tracker(Protocol):
    """A tracker. `place` names it for messages."""

    place: str

    def open(self, run: Run, now: str) -> TrackedRun:
        """Return the run in the tracker, which is created at the first send.

        `now` is the marker of all rows of the run.
        """


class Upload:
    """Sends one run."""

    def __init__(self, folder: Path, tracker: Tracker) -> None:
        self._folder, self._tracker = folder, tracker
        self._target: TrackedRun | None = None  # after the first send
        self._id, self._version = "", (0, 0, 0)

    def look(self, is_last: bool) -> int:
        """Send the rows that are new, and return their number.

        Raises:
            Failure: The run cannot be read, or the tracker does not take the rows.
        """
        count = 0
        if (version := _version(self._folder / METRICS)) != self._version:
            count = self._send()
            self._version = version
        if is_last:
            self._close()
        return count

    def _send(self) -> int:
        entries = read_entries(self._folder / METRICS, lambda *_: None)
        found = [(entry, shown) for entry in entries if (shown := row(entry))]
        if not found:
            return 0
        digests = _digests(entry for entry, _ in found)
        now = " ".join(digests[-1 - last] for last in _LAST_ROWS if last < len(digests))
        run = read_run(self._folder)
        if self._id != run.id:
            self._close()  # another run is in the folder
            self._id = run.id
        target = self._target or self._tracker.open(run, now)
        sent = set(target.sent.split())
        known = max((n for n, digest in enumerate(digests, 1) if digest in sent), default=0)
        if rows := [shown for _, shown in found[known:]]:
            target.send(rows, now)
            self._target = target
        return len(rows)

    def _close(self) -> None:
        if self._target is not None:
            self._target.close()
            self._target = None


def _version(path: Path) -> tuple[int, int, int]:
    """Return numbers that differ after each change of the file; zeros if it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def _digests(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the number and the digest of the first entry, of the first two, and so on."""
    digest, found = hashlib.sha256(), list[str]()
    for count, entry in enumerate(entries, 1):
        digest.update(json.dumps(entry).encode())
        found.append(f"{count}:{digest.hexdigest()[:16]}")
    return found


def send_runs(
    folders: Sequence[Path],
    tracker: Tracker,
    show: Callable[[str], None],
    wait: Callable[[], bool] | None = None,
) -> None:
    """Send the runs in `folders`, and show how many entries were new.

    With `wait`, look for new entries until `wait`, which is called between two looks, returns True.
    Then only the first and the last look must reach the tracker.

    Raises:
        WrongUse: No folder is a run or a sweep.
    """
    uploads: dict[Path, Upload] = {}
    skipped: set[Path] = set()
    is_first, is_last, is_lost = True, wait is None, False
    while True:
        for folder in folders:
            found = runs_in(folder)
            if found is None and folder not in skipped:
                show(f"skipped: {folder} is not a run or a sweep")
                skipped.add(folder)
            for run in found or []:
                uploads.setdefault(run, Upload(run, tracker))
        if is_first and skipped.issuperset(folders):
            raise WrongUse(
                f"no folder is a run or a sweep: name one with {MANIFEST}, such as "
                "runs/digits-7d2c1a90"
            )
        try:
            counts = [upload.look(is_last) for upload in uploads.values()]
            new, entries = sum(count > 0 for count in counts), sum(counts)
            if new:
                show(f"{_runs(new)}, {entries:,} {'entry' if entries == 1 else 'entries'}")
            elif wait is None:
                show(f"nothing new: {tracker.place} has {_runs(len(counts))}")
            is_lost = False
        except NetworkFailure as error:
            if is_first or is_last:
                raise
            if not is_lost:
                show(f"{error}; trying again")
            is_lost = True
        if is_last:
            return
        is_first, is_last = False, wait is None or wait()


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count:,} runs"


def send(
    folders: Sequence[Path],
    to: str,
    project: str | None,
    follow: bool,
    show: Callable[[str], None],
) -> None:
    """Send the entries of the runs in `folders` to the tracker `to`, and show what was sent.

    If they are followed, wait for new entries until a signal.
    """
    wait = _until_a_signal() if follow else None
    tracker = _tracker(to, project)
    if follow:
        show(f"following: new entries are sent to {tracker.place}; Ctrl-C ends this command")
    send_runs(folders, tracker, show, wait)


def _tracker(to: str, project: str | None) -> Tracker:
    """Open the tracker `to`, which is the class `Target` of the module `to_NAME`.

    Raises:
        WrongUse: The package is not installed, or the tracker refuses.
        NetworkFailure: The tracker cannot be reached.
        StorageFailure: The tracker's local database or folder cannot be read or written.
    """
    try:
        tracker: Tracker = importlib.import_module(f"trainer.track.to_{to}").Target(project)
        return tracker
    except ImportError as error:
        # The missing package may be that of a database: MySQLdb is a module of mysqlclient.
        module = (isinstance(error, ModuleNotFoundError) and error.name) or to
        package = (
            to if module.partition(".")[0] == to else f"the package that has the module {module}"
        )
        raise WrongUse(
            f"--to {to}: {error}: install {package}: write its name to a file my.txt and run "
            "`make extra-venv REQUIREMENTS=my.txt`, or install it with pip"
        ) from error


def _until_a_signal() -> Callable[[], bool]:
    """Return a function that waits for some seconds, and returns whether a signal has arrived.

    A second signal raises KeyboardInterrupt.
    """
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    def wait() -> bool:
        until = time.monotonic() + _LOOK_EVERY_S
        while not received and time.monotonic() < until:
            time.sleep(0.1)
        return bool(received)

    handle_stop_signals(note)
    return wait
