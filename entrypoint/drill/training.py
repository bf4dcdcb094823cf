"""Train a script in a folder of its own: undisturbed, or with kills."""

import contextlib
import hashlib
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals

from entrypoint.drill.folder import Version, reported_steps, steps, version_of, versions
from entrypoint.drill.starts import Process, failure_of, kill, start, wait
from entrypoint.launch.supervise import STOP_BUDGET_S
from entrypoint.script.folder import METRICS
from trainbox.contract.entries import EntryReader
from trainbox.contract.errors import ExitCode, Failure
from trainbox.contract.files import open_regular

TOO_LATE, STARTED_OVER = "too late", "started over"

_CLOSING_TABLE = f"{'run':<10} "  # the begin of the table that `trainbox run` prints at the end
# Exit codes of a start that got SIGTERM: the script has saved, or has no handler.
_STOPPED = (ExitCode.PREEMPTED, 128 + SIGTERM, -SIGTERM)
_SLACK_S = 30.0  # for the records of a start whose script was killed after the budget


@dataclass(frozen=True)
class StepTimes:
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
    """The moment of a kill: after `step`, or `delay_s` after the script has written a file.

    `by` is SIGKILL, or SIGTERM, at which a script can save.
    """

    step: int
    delay_s: float
    by: Signals = SIGKILL


@dataclass(frozen=True)
class Kill:
    """A kill of a start, `after_s` seconds after its begin.

    `reported` has the steps that were reported before it. `output` is the SHA-256 of the compared
    file, or None before the script wrote it. A script has `ignored` SIGTERM if it did not exit
    within the budget, and was then killed.
    """

    after_s: float
    reported: tuple[int, ...]
    output: str | None
    by: Signals
    ignored: bool


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

    def undisturbed(self, count: int) -> StepTimes:
        """Train on `count` processes without a kill.

        Raises:
            Failure: the training failed, with its exit code.
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
        return StepTimes(duration_s, first_s, last_s, max(reported_steps(self.run), default=0))

    def killed(self, counts: Sequence[int], moments: Sequence[Moment]) -> bool:
        """Train on `counts`, one start after the other, and kill each but the last.

        Return whether each of these starts ran until its kill. The others have ended before.

        Raises:
            Failure: a start failed, with its exit code.
        """
        for number, (count, moment) in enumerate(zip(counts, moments, strict=False)):
            begin, due = time.monotonic(), self._due(moment)
            process = self._start(count, number)
            wait(due, process)
            if process.poll() is not None:
                self._check(process, number)
                return False
            after_s = time.monotonic() - begin
            # A script that has ignored SIGTERM once is not given the budget again.
            by = SIGKILL if any(kill.ignored for kill in self.kills) else moment.by
            ignored = by == SIGTERM and not self._stop(process, number)
            if process.returncode == 0:  # it has ended before the signal
                return False
            kill(process, self.run)
            reported, output = tuple(reported_steps(self.run)), _sha256(self.output)
            self.kills.append(Kill(after_s, reported, output, by, ignored))
        process = self._start(counts[-1], len(moments))
        process.wait()
        self._check(process, len(moments))
        return True

    def _stop(self, process: Process, number: int) -> bool:
        """Send SIGTERM to a start, and wait for its end. Return whether the script has stopped.

        `trainbox run` kills a script that ignores SIGTERM at the end of the budget.

        Raises:
            Failure: the script failed, with its exit code.
        """
        begin = time.monotonic()
        process.send_signal(SIGTERM)
        try:
            process.wait(STOP_BUDGET_S + _SLACK_S)
        except subprocess.TimeoutExpired:
            return False
        if process.returncode not in _STOPPED:
            if time.monotonic() - begin >= STOP_BUDGET_S:
                return False
            self._check(process, number, f"start {number + 1}, stopped by SIGTERM,")
        return True

    def fault(self, kill: Kill) -> str | None:
        """Return why no resume was tested by the kill, as far as this can be seen.

        The compared file was complete before the kill, or the steps that the script reported
        afterwards begin with its first step.
        """
        if kill.output is not None and kill.output == _sha256(self.output):
            return TOO_LATE
        after, count = reported_steps(self.run), len(kill.reported)
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

    def _start(self, count: int, number: int) -> Process:
        return start(self.arguments(count), self._log(number), self.run)

    def _log(self, number: int) -> Path:
        return self.folder / f"start-{number}.log"

    def _check(self, process: Process, number: int, which: str = "") -> None:
        """Raise Failure if the start has failed. `which` describes it."""
        if process.returncode:
            failure = failure_of(process.returncode, self._log(number), _CLOSING_TABLE)
            which = which or (f"start {number + 1}, after a kill," if number else "the training")
            code = failure.exit_code
            raise Failure(f"{which} failed with exit code {code}: {failure}", exit_code=code)

    def _copy_early(self, now_s: float) -> None:
        if self.early_version is None and (version := version_of(self.output)):
            # A device such as /dev/zero has no end.
            with contextlib.suppress(OSError), open_regular(self.output) as output:
                with self.early.open("wb") as early:
                    shutil.copyfileobj(output, early)
                # A file that was written meanwhile may already be that of the end.
                if version_of(self.output) == version:
                    self.early_s, self.early_version = now_s, version


def moments(shares: Sequence[float], pace: StepTimes, signals: Sequence[Signals]) -> list[Moment]:
    """Return the moments of kills by `signals` at these shares of a training with this pace."""
    if pace.steps > len(shares) + 1:
        found, last = [], 0
        for share, by in zip(shares, signals, strict=True):
            last = max(last + 1, round(share * pace.steps))
            found.append(Moment(last, 0.0, by))
        return found
    work_s = pace.last_s - pace.first_s
    delays = [share - before for before, share in zip((0.0, *shares), shares, strict=False)]
    return [Moment(0, delay * work_s, by) for delay, by in zip(delays, signals, strict=True)]


def _sha256(path: Path) -> str | None:
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
