"""Send the rows of runs to a tracker, each value once.

A value is identified by its run, its name and its step. The tracker itself is asked which values it
has, so a send that was killed continues where it stopped.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from trainbox.contract.entries import EntryReader
from trainbox.contract.errors import Failure, NetworkFailure, StorageFailure, WrongUse
from trainbox.contract.files import open_regular
from trainer.track.runs import MANIFEST, METRICS, EntryRow, Run, find_runs, read_run, row


class TrackedRun(Protocol):
    """One run in a tracker.

    Attributes:
        sent: the digest of all rows that the last complete send ended with, or None.
    """

    sent: str | None

    def stored(self) -> set[tuple[str, int]]:
        """Return the names and steps of all values that the tracker has."""

    def send(self, rows: Sequence[EntryRow]) -> None:
        """Add rows whose values are not stored."""

    def close(self, sent: str) -> None:
        """Wait until all rows are stored, and then store the digest of all rows."""


class Tracker(Protocol):
    """A tracker. `place` names it for messages."""

    place: str

    def open(self, run: Run) -> TrackedRun:
        """Return the run in the tracker, which is created at the first send."""


class Upload:
    """Sends one run. A lock keeps a second process from sending the same run meanwhile."""

    def __init__(self, folder: Path, tracker: Tracker) -> None:
        self._folder, self._tracker = folder, tracker
        self._run: Run | None = None
        self._target: TrackedRun | None = None
        self._lock: int | None = None
        self._stored: set[tuple[str, int]] | None = None
        self._begin()

    def _begin(self) -> None:
        """Read the file from its start."""
        self._inode = _inode(self._folder / METRICS)
        self._reader = EntryReader(self._folder / METRICS)
        self._digest = hashlib.sha256()

    def look(self) -> int:
        """Send the rows that are new, and return their number.

        Raises:
            Failure: The run cannot be read, or the tracker does not take the rows.
        """
        # A resume replaces the file by one without the steps that are trained again.
        if self._inode != _inode(self._folder / METRICS):
            self._begin_again()
        rows = [found for entry in self._reader.read() if (found := row(entry))]
        if not rows:
            return 0
        for found in rows:
            self._digest.update(f"{found.step} {list(found.values)}\n".encode())
        try:
            return self._send(rows)
        except BaseException:
            # The next look begins again, and asks the tracker what it has.
            self._begin()
            self._release()
            raise

    def _send(self, rows: Sequence[EntryRow]) -> int:
        if self._target is None:
            self._run = self._run or read_run(self._folder)
            self._lock = _locked(self._folder)
            self._target = self._tracker.open(self._run)
            if self._target.sent == self._digest.hexdigest():
                return 0
        if self._stored is None:
            self._stored = self._target.stored()
        new = list(_without(self._stored, rows))
        if new:
            self._target.send(new)
        return len(new)

    def look_at_all(self) -> int:
        """Send the rows that are new, also in a file that was rewritten since the last look."""
        self._begin_again()
        return self.look()

    def _begin_again(self) -> None:
        """Read the file from its start. If the folder has another run, finish the old one."""
        old = self._run
        has_manifest = (self._folder / MANIFEST).is_file()
        if old is not None and has_manifest and read_run(self._folder).id != old.id:
            self.close()
            self._run = None
        self._begin()

    def close(self) -> None:
        """Wait until what was sent is stored."""
        try:
            if self._target is not None:
                self._target.close(self._digest.hexdigest())
        finally:
            self._release()

    def _release(self) -> None:
        self._stored = self._target = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _without(stored: set[tuple[str, int]], rows: Sequence[EntryRow]) -> Iterator[EntryRow]:
    """Yield the rows with the values that are not in `stored`, and add these to it."""
    for found in rows:
        values = {n: v for n, v in found.values.items() if (n, found.step) not in stored}
        stored.update((name, found.step) for name in values)
        if values:
            yield EntryRow(found.step, found.time_unix_s, values)


def send_once(folders: Sequence[Path], tracker: Tracker) -> str:
    """Send all runs, and return a line with the numbers of runs and entries that were new."""
    runs = find_runs(folders)
    counts = []
    for folder in runs:
        upload = Upload(folder, tracker)
        counts.append(upload.look())
        upload.close()
    return summary(counts) or f"nothing new: {tracker.place} has {_runs(len(runs))}"


def follow(
    folders: Sequence[Path],
    tracker: Tracker,
    wait: Callable[[], bool],
    report: Callable[[str], None],
) -> None:
    """Send what is new until `wait`, which is called between two looks, returns True.

    A lost connection and a removed folder are reported once, and the next look tries again. The
    first look must succeed.
    """
    uploads: dict[Path, Upload] = {}
    missing: set[Path] = set()
    connected: bool | None = None
    is_last = False
    while True:
        try:
            for run in _found(folders, missing, report if connected is not None else None):
                uploads.setdefault(run, Upload(run, tracker))
            counts = [u.look_at_all() if is_last else u.look() for u in uploads.values()]
            if text := summary(counts):
                report(text)
            connected = True
        except NetworkFailure as error:
            if connected is None or is_last:
                raise
            if connected:
                report(f"{error}; trying again")
            connected = False
        if is_last:
            break
        is_last = wait()
    _close_all(uploads.values())


def _close_all(uploads: Iterable[Upload]) -> None:
    """Close each upload, and then raise the first failure. A lost connection ends it at once."""
    first: Failure | None = None
    for upload in uploads:
        try:
            upload.close()
        except NetworkFailure:
            raise
        except Failure as error:
            first = first or error
    if first is not None:
        raise first


def _found(
    folders: Sequence[Path], missing: set[Path], report: Callable[[str], None] | None
) -> Iterator[Path]:
    """Yield the runs of each folder, and report once if a folder is no longer a run.

    Raises:
        WrongUse: A folder is neither a run nor a sweep, and `report` is None.
    """
    for folder in folders:
        try:
            yield from find_runs([folder])
            missing.discard(folder)
        except WrongUse:
            if report is None:
                raise
            if folder not in missing:
                report(f"{folder} is no longer a run or a sweep: its new entries are not sent")
            missing.add(folder)


def summary(counts: Sequence[int]) -> str:
    """Return `12 runs, 3,480 entries`, or an empty text if nothing was new."""
    total, entries = sum(count > 0 for count in counts), sum(counts)
    return f"{_runs(total)}, {entries:,} {'entry' if entries == 1 else 'entries'}" if total else ""


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count:,} runs"


def _inode(path: Path) -> int | None:
    """Return the file's inode, or None if it does not exist.

    Raises:
        StorageFailure: The file cannot be read.
    """
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageFailure(
            f"{path} cannot be read ({error.strerror}): check its rights"
        ) from error


def _locked(folder: Path) -> int | None:
    """Lock the run against other processes that send it. Some file systems cannot.

    The folder itself is locked, because a resume replaces its files.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageFailure(
            f"{folder} cannot be read ({error.strerror}): check its rights, and `ulimit -n`"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise WrongUse(f"another process tracks {folder}: wait until it ends") from None
    except OSError:
        os.close(lock)
        return None
    return lock
