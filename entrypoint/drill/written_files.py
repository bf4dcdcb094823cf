"""The files that a training writes into its folder, which of them it reads, and its steps."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from entrypoint.script.working_copies import BYTECODE, WORK, Version, version_of
from trainbox.files.entries import EntryReader, is_of_script, step_of
from trainbox.folders.record_folder import METRICS, OWN_NAMES

RUN = "run"  # the run folder in the folder of a training
_MOST_FILES = 200  # the files whose reads are observed, because each of them stays open
_EARLIER_NS = 3600 * 10**9


def versions(training: Path) -> dict[str, Version]:
    """Return the versions of the files in a training's folder by path, without Trainbox's files."""
    found = {}
    for top in (training / RUN, training / WORK):
        for folder, folders, files in os.walk(top):
            own = OWN_NAMES if Path(folder) == training / RUN else {BYTECODE}
            folders[:] = [name for name in folders if name not in own | {BYTECODE}]
            for name in files:
                path = Path(folder, name)
                if name not in own and (version := version_of(path)):
                    found[str(path.relative_to(training))] = version
    return found


class Reads:
    """Shows which files are read from now on, by their access times.

    With `relatime`, Linux updates the access time at a read only if it is before the last write, so
    it is set to an hour before. The files stay open, so that reads of a file are also seen if the
    file is replaced or removed later.
    """

    def __init__(self, training: Path, written: Mapping[str, Version]) -> None:
        self._files: dict[str, tuple[int, os.stat_result]] = {}
        for name in sorted(written, key=lambda name: -written[name].size)[:_MOST_FILES]:
            with contextlib.suppress(OSError):
                file = os.open(training / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                written_ns = os.fstat(file).st_mtime_ns
                os.utime(file, ns=(written_ns - _EARLIER_NS, written_ns))
                self._files[name] = file, os.fstat(file)
        self.found: set[str] = set()

    def look(self) -> None:
        """Note the files that were read since the last look."""
        for name, (file, before) in [*self._files.items()]:
            now = os.fstat(file)
            if now.st_atime_ns != before.st_atime_ns:
                # A read counts only before the start itself has written into the file: a start that
                # does not resume may read what it has just written.
                if now.st_mtime_ns == before.st_mtime_ns or now.st_atime_ns < now.st_mtime_ns:
                    self.found.add(name)
                del self._files[name]
                os.close(file)

    def close(self) -> None:
        """Look for the last time, and close the files."""
        self.look()
        for file, _ in self._files.values():
            os.close(file)
        self._files = {}


def records_reads(folder: Path) -> bool:
    """Return whether reads can be seen in the folder. With `noatime`, they cannot."""
    probe = folder / "probe"
    probe.write_bytes(b"x")
    reads = Reads(folder, {probe.name: Version(0, 1, 0)})
    probe.read_bytes()
    reads.close()
    probe.unlink()
    return bool(reads.found)


def reported_steps(run: Path) -> list[int]:
    """Return the steps that the script has reported in the run folder so far, in this order."""
    entries = EntryReader(run / METRICS).read()
    found = (step_of(entry) for entry in entries if is_of_script(entry))
    return [step for step in found if step is not None]
