"""The drill of any script: its training resumes after kills, and its result stays the same.

The drill starts `trainbox run SCRIPT`, undisturbed and with random kills, and compares a file.
"""

import functools
import random
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, Signals

from entrypoint.drill import schedule
from entrypoint.drill.compare import FileComparison, compare
from entrypoint.drill.evidence import (
    FINISHED,
    IGNORED,
    NOTHING_READ,
    STARTED_OVER,
    Resumption,
    resumption,
)
from entrypoint.drill.folder import RUN, WORK
from entrypoint.drill.schedule import KillSchedule, kill_shares, kill_signals, script_schedules
from entrypoint.drill.training import Due, Progress, Start, Training, never
from entrypoint.drill.work import UserFolder
from trainbox.contract.errors import ExitCode, Failure, StorageFailure, WrongUse
from trainbox.contract.temporary import keep, temporary_folder

_KILLS_WIDTH = 50
# A script that writes its first file after this share of its time may save at SIGTERM only.
_SAVED_BY = 0.95
_SOURCES = (".py", ".sh")


@dataclass(frozen=True)
class DrillRequest:
    """The script, the processes and the file of a drill.

    In `device`, the text {processes} is replaced by a number. `script` are the last arguments of
    `trainbox run`. `ignored` has patterns of entries that are not compared.
    """

    script: tuple[str, ...]
    device: tuple[str, ...]
    file: str
    counts: tuple[int, ...]
    kills: int
    tolerance: float
    ignored: tuple[str, ...] = ()

    def arguments(self, folder: Path, count: int, user: UserFolder) -> list[str]:
        """Return the arguments of `trainbox` for a start on `count` processes.

        Paths of the user's folder in the script's arguments are those of the copy.
        """
        device = [argument.replace("{processes}", str(count)) for argument in self.device]
        run = ["--nnodes", "1", "--runs-dir", str(folder), "--run", RUN]
        script = [user.replaced(argument, folder / WORK) for argument in self.script]
        return ["run", *device, *run, *script]


@dataclass(frozen=True)
class Outcome:
    """A training of the drill, and the comparison of its file with that of the first training.

    `resumption` is None if the training was not disturbed.
    """

    case: KillSchedule
    training: Training
    comparison: FileComparison
    resumption: Resumption | None = None

    @property
    def notes(self) -> tuple[str | None, ...]:
        """What is unusual about each kill."""
        return self.resumption.notes if self.resumption else ()

    def kills(self) -> str:
        """Return the column of the kills."""
        if not self.resumption:
            return "undisturbed"
        starts = [start for start in self.training.starts if start.kill]
        by_step = all(start.reported for start in starts)
        shown = [
            f"{start.kill.by.name} at "
            + ("step " if by_step and number == 0 else "")
            + (f"{max(start.reported)}" if by_step else f"{start.kill.after_s:.1f} s")
            + (f" ({note})" if note else "")
            for number, (start, note) in enumerate(zip(starts, self.notes, strict=True))
            if start.kill
        ]
        if len(starts) + 1 < len(self.case.processes):
            shown.append(f"ended before kill {len(starts) + 1}")
        return ", ".join(shown)

    def row(self, first: FileComparison, tolerance: float) -> str:
        """Return the row of the training in the table."""
        if self.comparison.difference:
            verdict = "DIFFERENT"
        elif self.comparison.digest == first.digest:
            verdict = "same"
        else:
            verdict = f"within {tolerance:g}"
        digest = self.comparison.digest[:16]
        return schedule.row(self.case, self.kills(), digest, verdict, _KILLS_WIDTH)


def drill_script(request: DrillRequest, draw: random.Random) -> Iterator[str]:
    """Train the script with each schedule; yield the table line by line.

    Raises:
        Failure: a training failed, with its exit code.
        Failure: the files differ, or nothing shows that a training has resumed.
    """
    with temporary_folder("drill-") as folder:
        try:
            real = folder.resolve()
            yield from _Drill(request, real, UserFolder(Path.cwd(), real)).lines(draw)
        except Failure as error:
            keep(folder)
            error.args = (f"drill run: {error} (kept: {folder})",)
            raise
        except OSError as error:
            raise StorageFailure(
                f"drill run: the current folder cannot be copied to {folder} ({error}): set TMPDIR "
                "to a folder with more space, or start the drill where only the project is"
            ) from error


@dataclass
class _Drill:
    request: DrillRequest
    folder: Path
    user: UserFolder
    excluded: set[str] = field(default_factory=set)  # files of the user that the script writes
    outcomes: list[Outcome] = field(default_factory=list)

    def lines(self, draw: random.Random) -> Iterator[str]:
        """Yield the messages, the table and the conclusion."""
        yield from self.user.messages
        case, *cases = script_schedules(self.request.counts, self.request.kills)
        reference = yield from self._reference(case)
        try:
            first = compare([(reference.output, reference.folder)], 0.0, self.request.ignored)
        except WrongUse as error:
            raise WrongUse(f"the undisturbed training: {error}") from error
        self.outcomes.append(Outcome(case, reference, first))
        yield f"{self.request.file}\n  {'processes':<18} {'':<{_KILLS_WIDTH}} digest"
        yield self.outcomes[0].row(first, self.request.tolerance)
        for number, case in enumerate(cases, 1):
            training = self._training(f"case-{number}")
            if len(case.processes) == 1:
                self._train(training, case)
            else:
                signals = kill_signals(self.request.kills, number - len(self.request.counts))
                if self._did_not_stop():
                    signals = [SIGKILL] * self.request.kills
                moments = due(kill_shares(self.request.kills, draw), reference.starts[0])
                self._train(training, case, moments, signals)
            self.outcomes.append(self._outcome(case, training))
            yield self.outcomes[-1].row(first, self.request.tolerance)
        self._check_bits()
        self._check_resumed()
        yield from self._conclusion()

    def _reference(self, case: KillSchedule) -> Generator[str, None, Training]:
        """Return an undisturbed training. Yield what is left out of the copies for it.

        The script could load files that it writes itself, such as an old checkpoint in the current
        folder. So they are left out, and the training begins again.
        """
        while True:
            training = self._training("case-0")
            overwrites = functools.partial(_overwrites, training)
            self._train(training, case, overwrites, [SIGKILL])
            if not (found := training.overwritten()):
                return training
            shutil.rmtree(training.folder)
            names = [name.removeprefix(f"{WORK}/") for name in found]
            self.excluded.update(names)
            yield (
                f"{', '.join(names)} in the current folder: left out, because the script writes "
                "such files"
            )

    def _training(self, name: str) -> Training:
        folder = self.folder / name
        return Training(
            folder,
            lambda count: self.request.arguments(folder, count, self.user),
            self.request.file,
        )

    def _train(
        self,
        training: Training,
        case: KillSchedule,
        moments: Callable[[int], Due] = never,
        signals: Sequence[Signals] = (),
    ) -> None:
        """Train in a new copy of the user's folder.

        Raises:
            Failure: the training failed, or the user's folder was changed.
        """
        self.user.copy(training.folder / WORK, self.excluded)
        try:
            training.train(case.processes, moments, signals)
        finally:
            changed = self.user.changed()
        if changed:
            raise Failure(
                f"{', '.join(changed[:4])} changed in the current folder during the drill: let the "
                "script write to the run folder ({run} or TRAINBOX_RUN), and edit nothing meanwhile"
            )

    def _with_reference(self, training: Training) -> FileComparison:
        """Compare the file of a training with that of the undisturbed one."""
        reference, request = self.outcomes[0].training, self.request
        pair = [(reference.output, reference.folder), (training.output, training.folder)]
        try:
            return compare(pair, request.tolerance, request.ignored)
        except WrongUse as error:
            return FileComparison("-" * 16, str(error))

    def _outcome(self, case: KillSchedule, training: Training) -> Outcome:
        """Compare a training with the undisturbed one, and decide whether it has resumed."""
        comparison = self._with_reference(training)
        if len(case.processes) == 1:
            return Outcome(case, training, comparison)

        def is_final(copy: Path) -> bool:
            pair = [(training.output, training.folder), (copy, training.folder)]
            try:
                return compare(pair, 0.0, self.request.ignored).difference is None
            except WrongUse:  # one of them is incomplete
                return False

        last = case.processes[len(training.starts) - 1]
        undisturbed = next(
            outcome.training.starts[0]
            for outcome in self.outcomes
            if outcome.case.processes == (last,)
        )
        return Outcome(case, training, comparison, resumption(training, undisturbed, is_final))

    def _did_not_stop(self) -> bool:
        """Return whether the script has trained on after a SIGTERM."""
        return any({IGNORED, FINISHED} & {*outcome.notes} for outcome in self.outcomes)

    def _check_bits(self) -> None:
        """Check that the files agree.

        Raises:
            Failure: they differ. It names the first difference, and what can cause it.
        """
        outcome = next((found for found in self.outcomes if found.comparison.difference), None)
        if outcome is None:
            return
        what, first = outcome.comparison.difference, self.outcomes[0]
        if len(outcome.case.processes) == 1:
            message = (
                f"the undisturbed training on {outcome.case} processes differs from that on "
                f"{first.case}: {what}; this is the number of processes and not the resume: give a "
                "--tolerance, or drill each number by itself"
            )
        else:
            again = self._training("again")
            self._train(again, first.case)
            if repeated := self._with_reference(again).difference:
                message = (
                    f"two undisturbed trainings differ: {repeated}; this is the script and not the "
                    "resume: seed all its random numbers, give a --tolerance, or leave out a value "
                    "such as a time with --ignore NAME"
                )
            else:
                message = (
                    f"the training {outcome.case} differs from the undisturbed one: {what}; two "
                    "undisturbed trainings are the same, so its checkpoint does not have all of "
                    "its state, or the value depends on the start: then leave it out with --ignore "
                    "NAME"
                )
        raise Failure(message, exit_code=ExitCode.DIFFERENT)

    def _check_resumed(self) -> None:
        """Check that each training with kills has resumed after one of them.

        Raises:
            Failure: nothing shows this.
        """
        read = self.outcomes[0].training.starts[0].reads.found
        old = sorted(name for name in read if Path(name).suffix not in _SOURCES)
        hint = f", and move old checkpoints away (it reads {', '.join(old[:4])})" if old else ""
        for outcome in self.outcomes:
            if outcome.resumption and not outcome.resumption.resumed:
                raise Failure(
                    f"resume not shown, in the training {outcome.case}: {outcome.resumption.reason}"
                    ": let the script load its checkpoint from the run folder ({run} or "
                    f"TRAINBOX_RUN){hint}",
                    exit_code=ExitCode.DIFFERENT,
                )

    def _conclusion(self) -> Iterator[str]:
        """Yield whether the bits are the same, the evidence of the resumes, and warnings."""
        comparisons = [outcome.comparison for outcome in self.outcomes]
        digests = {comparison.digest for comparison in comparisons}
        ignored = self.request.ignored
        without = f", without {', '.join(ignored)} (--ignore)" if ignored else ""
        for outcome in self.outcomes:
            if outcome.resumption:
                yield f"  resumed, {outcome.case}: {outcome.resumption.reason}"
        kills = [
            (kill.by, note)
            for outcome in self.outcomes
            for kill, note in zip(outcome.training.kills, outcome.notes, strict=False)
        ]
        if kills and {note for by, note in kills if by == SIGKILL} <= {STARTED_OVER, NOTHING_READ}:
            yield (
                "  no start resumed after a SIGKILL: save during the training, and not only at "
                "SIGTERM"
            )
        if self._did_not_stop():
            yield (
                "  the script did not stop at SIGTERM: a job that is stopped loses its work since "
                "the last checkpoint"
            )
        if len(digests) == 1:
            yield f"  the same bits in all {len(comparisons)} trainings{without}: {digests.pop()}"
            return
        largest = max(comparison.largest for comparison in comparisons)
        yield (
            f"  all {len(comparisons)} trainings agree within {self.request.tolerance:g}{without}; "
            f"the largest difference is {largest:.3g}"
        )


def due(shares: Sequence[float], undisturbed: Start) -> Callable[[int], Due]:
    """Return the moments of kills at these shares of a training like the undisturbed one.

    They follow its steps, if it reports them. Otherwise they follow the time since a start has
    written its first file, because a kill before the first checkpoint shows nothing.
    """
    steps = max(undisturbed.reported, default=0)
    saves = undisturbed.first_s <= _SAVED_BY * undisturbed.last_s
    work_s = undisturbed.last_s - undisturbed.first_s

    def moment(number: int) -> Due:
        share, before = shares[number], shares[number - 1] if number else 0.0
        step = max(number + 1, round(share * steps))

        def by_step(now: Progress) -> bool:
            return now.step >= step and (now.first_s is not None or not saves)

        def by_time(now: Progress) -> bool:
            if not saves:
                return now.elapsed_s >= share * undisturbed.last_s
            delay_s = (share - before) * work_s
            return now.first_s is not None and now.elapsed_s >= now.first_s + delay_s

        return by_step if steps > len(shares) + 1 else by_time

    return moment


def _overwrites(training: Training, _number: int) -> Due:
    return lambda _now: bool(training.overwritten())
