"""Train in a folder of its own: undisturbed, or with kills."""

import contextlib
import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM, Signals

from entrypoint.drill.starts import STOPPED, failure_of, kill, stop, wait
from entrypoint.drill.written_files import (
    RUN,
    Reads,
    records_reads,
    reported_steps,
    versions,
)
from entrypoint.launch.inner_trainings import start
from entrypoint.script.working_copies import WORK, Version
from trainbox.errors import Failure
from trainbox.files.regular_files import open_regular
from trainbox.files.temporary import keep, temporary_folder

_DIGITS = re.compile(r"\d+")


def numberless(name: str) -> str:
    """Return a name with its numbers replaced: `checkpoint-0.pt` for `checkpoint-100.pt`."""
    return _DIGITS.sub("0", name)


@dataclass(frozen=True)
class StartProgress:
    """How far a start is.

    Attributes:
        elapsed_s: the seconds since its begin.
        first_s: the seconds until it wrote its first file; None if it has written none.
        step: its newest reported step.
    """

    elapsed_s: float
    first_s: float | None
    step: int


Due = Callable[[StartProgress], bool]
Kill = tuple[Due, Signals]  # what tells the moment of the kill, and the signal


@dataclass(frozen=True)
class Start:
    """What the drill saw of a start.

    Attributes:
        first_s: the seconds until it wrote its first file, or until its end if it wrote none.
        last_s: the seconds until it wrote its last file, or until its end if it wrote none.
        end_s: the seconds until its end or its kill.
        writes_s: the seconds of the observed writes of each file that is left at the end. Files
            whose names differ only in their digits are one file.
        steps: the steps that it has reported.
        read: the files of earlier starts that it has read; None if the file system does not record
            reads.
        killed_by: the signal that killed it; None if it has ended by itself.
        ignored: whether the script did not exit in time after SIGTERM, and was then killed.
        output: a copy of the compared file at the kill; None if the script had not written it.
    """

    first_s: float
    last_s: float
    end_s: float
    writes_s: Mapping[str, Sequence[float]]
    steps: tuple[int, ...]
    read: frozenset[str] | None
    killed_by: Signals | None = None
    ignored: bool = False
    output: Path | None = None


@contextlib.contextmanager
def drill_folder(name: str) -> Iterator[Path]:
    """Yield a folder for the trainings of the drill `name`. It is kept if the drill fails."""
    with temporary_folder("drill-") as folder:
        try:
            yield folder.resolve()
        except Failure as failure:
            keep(folder)
            failure.args = (f"{name}: {failure} (kept: {folder})",)
            raise


@dataclass
class Training:
    """A training of a drill, with its starts.

    Attributes:
        folder: contains the run folder, and for a script a copy of the user's folder.
        arguments: returns the arguments of `trainbox` for a number of processes.
        file: the path of the file that is compared, in the run folder. If it is not there, the
            script has written it in the copy of the user's folder.
        starts: the starts so far, each of which was killed, but not the last one of all.
    """

    folder: Path
    arguments: Callable[[int], Sequence[str]]
    file: str = ""
    starts: list[Start] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._records_reads = records_reads(self.folder)
        self._initial: dict[str, Version] = {}
        self._now: dict[str, Version] = {}

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / RUN

    @property
    def output(self) -> Path:
        """The file that is compared."""
        copy = f"{WORK}/{self.file}"
        is_written = self._now.get(copy) != self._initial.get(copy)
        in_run = (self.run / self.file).exists()
        return self.folder / copy if is_written and not in_run else self.run / self.file

    def train(self, counts: Sequence[int], kills: Iterable[Kill] = ()) -> None:
        """Start once for each of `counts`, the numbers of processes; kill each start but the last.

        The iterable `kills` is asked for the next kill when a start begins. A start that ends
        before its kill is the last one.

        Raises:
            Failure: a start failed, with its exit code.
        """
        self._initial = self._now = versions(self.folder)
        for number, (count, by) in enumerate(itertools.zip_longest(counts, kills)):
            self.starts.append(self._started(number, count, *(by or (None, None))))
            if self.starts[-1].killed_by is None:
                return

    def overwritten(self) -> list[str]:
        """Return the initial files that the training has written, or that have a similar name.

        Names that differ only in their digits are similar, such as `step-100.pt` and `step-200.pt`.
        """
        now, before = self._now, self._initial
        changed = {
            numberless(name)
            for name in now.keys() | before.keys()
            if now.get(name) != before.get(name)
        }
        return sorted(name for name in before if numberless(name) in changed)

    def _started(self, number: int, count: int, due: Due | None, by: Signals | None) -> Start:
        reads = Reads(self.folder, dict(self._now.items() - self._initial.items()))
        earlier, new = reported_steps(self.run), list[int]()
        changes, writes_s = list[float](), dict[str, list[float]]()
        begin_s = time.monotonic()
        log = self.folder / f"start-{number}.log"
        process = start(self.arguments(count), log, self.folder / WORK)

        def look() -> bool:
            elapsed_s = time.monotonic() - begin_s
            reads.look()
            if (now := versions(self.folder)) != self._now:
                for name in {numberless(name) for name in now if now[name] != self._now.get(name)}:
                    writes_s.setdefault(name, []).append(elapsed_s)
                self._now = now
                changes.append(elapsed_s)
            reported = reported_steps(self.run)
            continues = reported[: len(earlier)] == earlier  # or else the script replaced the file
            new[:] = reported[len(earlier) :] if continues else reported
            begun_s = changes[0] if changes else None
            return due is not None and due(StartProgress(elapsed_s, begun_s, max(new, default=0)))

        def progress() -> str:
            step = f", step {max(new)}" if new else ""
            elapsed_s = time.monotonic() - begin_s
            return f"  {self.folder.name}, start {number + 1}: {elapsed_s:.0f} s{step}"

        which = f"start {number + 1}, after a kill," if number else "the training"
        ignored = False
        try:
            wait(look, process, progress)
            end_s = time.monotonic() - begin_s
            if process.poll() is not None:
                by = None
            elif by == SIGTERM:
                which, ignored = f"start {number + 1}, stopped by SIGTERM,", stop(process)
                by = by if ignored or process.returncode in STOPPED else None
        finally:  # also after Ctrl-C, before the folder is removed
            if process.poll() is None:
                kill(process)
        if by is None and process.returncode:
            failure = failure_of(process.returncode, log)
            code = failure.exit_code
            raise Failure(f"{which} failed with exit code {code}: {failure}", exit_code=code)
        look()
        reads.close()  # before the drill itself reads a file
        ends = (changes[0], changes[-1]) if changes else (end_s, end_s)
        left = {*map(numberless, self._now)}
        return Start(
            *ends,
            end_s,
            {name: seconds for name, seconds in writes_s.items() if name in left},
            tuple(new),
            frozenset(reads.found) if self._records_reads else None,
            by,
            ignored,
            self._copied_output(number) if by else None,
        )

    def _copied_output(self, number: int) -> Path | None:
        copy = self.folder / f"killed-{number}{self.output.suffix}"
        # A device such as /dev/zero has no end.
        with contextlib.suppress(OSError), open_regular(self.output) as output:
            with copy.open("wb") as file:
                shutil.copyfileobj(output, file)
            return copy
        return None
