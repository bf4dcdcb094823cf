"""Train a script in a folder of its own: undisturbed, or with kills."""

import contextlib
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entrypoint.drill.folder import Version, steps, version_of, versions
from entrypoint.drill.starts import Process, failure_of, start, wait
from entrypoint.errors import DrillFailed
from entrypoint.script.folder import METRICS
from entrypoint.system.processes import with_variable
from trainbox.entries import EntryReader

TOO_LATE, STARTED_OVER = "too late", "started over"

_POLL_S = 0.02
_CLOSING_TABLE = f"{'run':<10} "  # the begin of the table that `trainbox run` prints at the end
_END_S = 30.0  # the wait for the processes of a killed start


@dataclass(frozen=True)
class Pace:
    """The times of an undisturbed training, by which the others are killed.

    `first_s` and `last_s` are the seconds until the script wrote its first and its last file.
    `steps` is the last step that it reported, or 0.
    """

    duration_s: float
    first_s: float
    last_s: float
    steps: int


@dataclass(frozen=True)
class Moment:
    """The moment of a kill: after `step`, or `delay_s` after the script has written a file."""

    step: int
    delay_s: float


@dataclass(frozen=True)
class Kill:
    """A kill of a start, `after_s` seconds after its begin.

    `reported` has the steps that were reported before it. `output` is the SHA-256 of the compared
    file, or None before the script wrote it.
    """

    after_s: float
    reported: tuple[int, ...]
    output: str | None


@dataclass
class Training:
    """A script's training in `folder`, and the file of its run folder that is compared.

    `arguments` returns those of `trainbox` for a number of processes.
    """

    arguments: Callable[[int], Sequence[str]]
    folder: Path
    file: str
    kills: list[Kill] = field(default_factory=list)
    # The time and the version of `early`, a copy of the first version of the compared file.
    early_s: float = 0.0
    early_version: Version | None = None

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    @property
    def output(self) -> Path:
        """The file that is compared."""
        return self.run / self.file

    @property
    def early(self) -> Path:
        """A copy of the first version of the compared file."""
        return self.folder / f"early{self.output.suffix}"

    def undisturbed(self, count: int) -> Pace:
        """Train on `count` processes without a kill.

        Raises:
            DrillFailed: the training failed, with its exit code.
        """
        begin, before, times = time.monotonic(), dict[str, Version](), list[float]()
        process = self._start(count, 0)

        def look() -> bool:
            nonlocal before
            if (now := versions(self.run)) != before:
                before = now
                times.append(time.monotonic() - begin)
                self._copy_early(times[-1])
            return False

        wait(look, process)
        duration_s = time.monotonic() - begin
        look()
        self._check(process, 0)
        first_s, last_s = (times[0], times[-1]) if times else (duration_s, duration_s)
        return Pace(duration_s, first_s, last_s, max(self._steps(), default=0))

    def killed(self, counts: Sequence[int], moments: Sequence[Moment]) -> bool:
        """Train on `counts`, one start after the other, and kill each but the last.

        Return whether each of these starts ran until its kill. The others have ended before.

        Raises:
            DrillFailed: a start failed, with its exit code.
        """
        for number, (count, moment) in enumerate(zip(counts, moments, strict=False)):
            begin, due = time.monotonic(), self._due(moment)
            process = self._start(count, number)
            wait(due, process)
            if process.poll() is not None:
                self._check(process, number)
                return False
            self._kill(process)
            after_s = time.monotonic() - begin
            self.kills.append(Kill(after_s, tuple(self._steps()), _sha256(self.output)))
        process = self._start(counts[-1], len(moments))
        process.wait()
        self._check(process, len(moments))
        return True

    def fault(self, kill: Kill) -> str | None:
        """Return why no resume was tested by the kill, as far as this can be seen.

        The compared file was complete before the kill, or the steps that the script reported
        afterwards begin with its first step.
        """
        if kill.output is not None and kill.output == _sha256(self.output):
            return TOO_LATE
        after, count = self._steps(), len(kill.reported)
        if not count or tuple(after[:count]) != kill.reported or len(after) == count:
            return None
        return STARTED_OVER if after[count] <= after[0] else None

    def _due(self, moment: Moment) -> Callable[[], bool]:
        """Return a function that returns whether it is time to kill the start that begins now."""
        before, reader = versions(self.run), EntryReader.at_end(self.run / METRICS)
        newest = 0
        changed_at: float | None = None

        def by_step() -> bool:
            nonlocal newest
            newest = max(newest, *steps(reader.read()), 0)
            return newest >= moment.step and bool(versions(self.run))

        def by_time() -> bool:
            nonlocal changed_at
            if changed_at is None and versions(self.run) != before:
                changed_at = time.monotonic()
            return changed_at is not None and time.monotonic() >= changed_at + moment.delay_s

        return by_step if moment.step else by_time

    def _steps(self) -> list[int]:
        """Return the steps that the script has reported so far."""
        return steps(EntryReader(self.run / METRICS).read())

    def _start(self, count: int, number: int) -> Process:
        return start(self.arguments(count), self._log(number))

    def _log(self, number: int) -> Path:
        return self.folder / f"start-{number}.log"

    def _check(self, process: Process, number: int) -> None:
        if process.returncode:
            failure = failure_of(process.returncode, self._log(number), _CLOSING_TABLE)
            when = f"start {number + 1}, after a kill, failed" if number else "the training failed"
            raise DrillFailed(
                failure.exit_code, f"{when} with exit code {failure.exit_code}: {failure}"
            )

    def _kill(self, process: Process) -> None:
        """Kill the command and all processes that it started, as the end of a job does."""
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + _END_S
        while living := with_variable("TRAINBOX_RUN", str(self.run)):
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise DrillFailed(
                    1, f"process {living[0]} still runs {_END_S:.0f} s after it was killed"
                )
            time.sleep(_POLL_S)

    def _copy_early(self, now_s: float) -> None:
        if self.early_version is None and (version := version_of(self.output)):
            with contextlib.suppress(OSError):
                shutil.copyfile(self.output, self.early)
                self.early_s, self.early_version = now_s, version


def moments(shares: Sequence[float], pace: Pace) -> list[Moment]:
    """Return the moments of kills at these shares of a training with this pace."""
    if pace.steps > len(shares) + 1:
        found, last = [], 0
        for share in shares:
            last = max(last + 1, round(share * pace.steps))
            found.append(Moment(last, 0.0))
        return found
    work_s = pace.last_s - pace.first_s
    delays = [share - before for before, share in zip((0.0, *shares), shares, strict=False)]
    return [Moment(0, delay * work_s) for delay in delays]


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
