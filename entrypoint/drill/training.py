"""Train in a folder of its own: undisturbed, or with kills."""

import contextlib
import itertools
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals

from entrypoint.drill.folder import (
    RUN,
    WORK,
    Reads,
    Version,
    records_reads,
    reported_steps,
    steps,
    versions,
)
from entrypoint.drill.starts import Process, failure_of, kill, start, wait
from entrypoint.launch.supervise import STOP_BUDGET_S
from trainbox.contract.entries import EntryReader
from trainbox.contract.errors import ExitCode, Failure
from trainbox.contract.files import open_regular
from trainbox.contract.record_folder import METRICS

# Exit codes of a start that got SIGTERM: the script has saved, or has no handler.
_STOPPED = (ExitCode.PREEMPTED, 128 + SIGTERM, -SIGTERM)
_DIGITS = re.compile(r"\d+")
_SLACK_S = 30.0  # for the records of a start whose script was killed after the budget


def numberless(name: str) -> str:
    """Return the same text for `checkpoint-100.pt` and `checkpoint-200.pt`."""
    return _DIGITS.sub("0", name)


@dataclass(frozen=True)
class Progress:
    """How far a start is: its seconds, those until it has written a file, and its newest step."""

    elapsed_s: float
    first_s: float | None
    step: int


Due = Callable[[Progress], bool]


def never(_number: int) -> Due:
    """Return the moment of no kill."""
    return lambda _now: False


@dataclass(frozen=True)
class Kill:
    """A kill of a start. `output` is a copy of the compared file, if the script has written it.

    A script has `ignored` SIGTERM if it did not exit within the budget, and was then killed.
    """

    after_s: float
    by: Signals
    ignored: bool
    output: Path | None


@dataclass(frozen=True)
class Start:
    """What was seen of a start.

    `first_s` and `last_s` are the seconds until it wrote its first and its last file, or those
    until its end. `written_s` has the seconds until it first wrote each file that is left at its
    end, by the path with all numbers replaced. `reported` has the steps of all starts so far.
    `reads` has the files of earlier starts that this one has read, and for the first start those
    of the user's folder. `kill` is None if the start has ended before.
    """

    first_s: float
    last_s: float
    written_s: Mapping[str, float]
    reported: tuple[int, ...]
    reads: Reads
    kill: Kill | None


@dataclass
class Training:
    """A training in `folder`, which has its run folder and maybe a copy of the user's folder.

    `arguments` returns those of `trainbox` for a number of processes. `file` is the path in the run
    folder of the file that is compared.
    """

    folder: Path
    arguments: Callable[[int], Sequence[str]]
    file: str = ""
    starts: list[Start] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.records_reads = records_reads(self.folder)
        self._initial: dict[str, Version] = {}
        self._now: dict[str, Version] = {}

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / RUN

    @property
    def output(self) -> Path:
        """The file that is compared."""
        return self.run / self.file

    @property
    def kills(self) -> list[Kill]:
        """The kills of the starts."""
        return [start.kill for start in self.starts if start.kill]

    def train(
        self,
        counts: Sequence[int],
        due: Callable[[int], Due] = never,
        signals: Sequence[Signals] = (),
    ) -> None:
        """Train on `counts`, one start after the other, and kill each but the last.

        `due` returns the moment of the kill for the number of a start. A start that ends before its
        kill is the last.

        Raises:
            Failure: a start failed, with its exit code.
        """
        self._initial = self._now = versions(self.folder)
        for number, (count, by) in enumerate(itertools.zip_longest(counts, signals)):
            self.starts.append(self._started(number, count, due(number) if by else None, by))
            if self.starts[-1].kill is None:
                return

    def written(self) -> dict[str, Version]:
        """Return the files that were written since the begin of the training."""
        return {
            name: version
            for name, version in self._now.items()
            if self._initial.get(name) != version
        }

    def overwritten(self) -> list[str]:
        """Return the initial files that the training has written, or that have a similar name.

        A name that differs only in its digits is similar, such as that of an older checkpoint.
        """
        now, before = self._now, self._initial
        changed = {
            numberless(name)
            for name in now.keys() | before.keys()
            if now.get(name) != before.get(name)
        }
        return sorted(name for name in before if numberless(name) in changed)

    def _started(self, number: int, count: int, due: Due | None, by: Signals | None) -> Start:
        reads = Reads(self.folder, self.written() if number else self._initial)
        earlier = tuple(reported_steps(self.run))
        changes, first_s = list[float](), dict[str, float]()
        reader, newest = EntryReader.at_end(self.run / METRICS), 0
        begin_s = time.monotonic()
        log = self.folder / f"start-{number}.log"
        process = start(self.arguments(count), log, self.run, self.folder / WORK)

        def look() -> bool:
            nonlocal newest
            elapsed_s = time.monotonic() - begin_s
            reads.look()
            if (now := versions(self.folder)) != self._now:
                for name in now:
                    if now[name] != self._now.get(name):
                        first_s.setdefault(numberless(name), elapsed_s)
                self._now = now
                changes.append(elapsed_s)
            newest = max(newest, *steps(reader.read()), 0)
            begun_s = changes[0] if changes else None
            return due is not None and due(Progress(elapsed_s, begun_s, newest))

        wait(look, process)
        kill_after_s = time.monotonic() - begin_s
        stopped = None
        if by and process.poll() is None:
            stopped = self._killed(process, number, by)
        else:
            self._check(process, number)
        look()
        reads.close()  # before the drill itself reads a file
        killed = Kill(kill_after_s, *stopped, self._copied_output(number)) if stopped else None
        reported = tuple(reported_steps(self.run))
        if reported[: len(earlier)] != earlier:  # the script has replaced the file
            reported = (*earlier, *reported)
        ends = (changes[0], changes[-1]) if changes else (kill_after_s, kill_after_s)
        left = {*map(numberless, self._now)}
        written_s = {name: seconds for name, seconds in first_s.items() if name in left}
        return Start(*ends, written_s, reported, reads, killed)

    def _killed(self, process: Process, number: int, by: Signals) -> tuple[Signals, bool] | None:
        """Kill a start, and return how: see `Kill`. Return None if it has ended before."""
        # A script that has ignored SIGTERM once is not given the budget again.
        by = SIGKILL if any(kill.ignored for kill in self.kills) else by
        ignored = by == SIGTERM and not self._stop(process, number)
        if process.returncode == 0:
            return None
        kill(process, self.run)
        return by, ignored

    def _copied_output(self, number: int) -> Path | None:
        copy = self.folder / f"killed-{number}{self.output.suffix}"
        # A device such as /dev/zero has no end.
        with contextlib.suppress(OSError), open_regular(self.output) as output:
            with copy.open("wb") as file:
                shutil.copyfileobj(output, file)
            return copy
        return None

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

    def _check(self, process: Process, number: int, which: str = "") -> None:
        """Raise Failure if the start has failed. `which` describes it."""
        if process.returncode:
            failure = failure_of(process.returncode, self.folder / f"start-{number}.log")
            which = which or (f"start {number + 1}, after a kill," if number else "the training")
            code = failure.exit_code
            raise Failure(f"{which} failed with exit code {code}: {failure}", exit_code=code)
