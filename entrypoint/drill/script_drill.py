"""The drill of any script: its training resumes after kills, and its result stays the same.

The drill starts `trainbox run SCRIPT`, undisturbed and with random kills, and compares a file.
"""

import itertools
import random
import shutil
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, Signals

from entrypoint.drill.compare_files import FileComparison, compare
from entrypoint.drill.evidence import FINISHED, MEANINGS, resumption
from entrypoint.drill.schedule import (
    KillSchedule,
    kill_shares,
    kill_signals,
    row,
    script_schedules,
)
from entrypoint.drill.training import Due, Kill, Start, StartProgress, Training, drill_folder
from entrypoint.drill.written_files import RUN
from entrypoint.script.working_copies import WORK, UserFolder
from trainbox.errors import ExitCode, Failure, WrongUse

_KILLS_WIDTH = 50
# If the undisturbed training writes its first file only after 95 % of its time, the script probably
# saves during a training only at SIGTERM.
_SAVED_BY = 0.95


@dataclass(frozen=True)
class DrillRequest:
    """The request of a drill: the script, the processes and the file that is compared.

    In `device`, the text {processes} is replaced by the number of processes. `script` has the
    script and its arguments. `ignored` has patterns of entries that are not compared.
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

        In the script's arguments, paths into the user's folder become paths into the copy.
        """
        device = [argument.replace("{processes}", str(count)) for argument in self.device]
        run = ["--nnodes", "1", "--runs-dir", str(folder), "--run", RUN]
        script = [user.replaced(argument, folder / WORK) for argument in self.script]
        return ["run", *device, *run, *script]


@dataclass(frozen=True)
class Outcome:
    """A training of the drill, and the comparison of its file with the first training's file.

    A training with kills has `resumed`, or nothing shows this, for the `reason`. `notes` has a note
    on each kill that is unusual.
    """

    case: KillSchedule
    training: Training
    comparison: FileComparison
    resumed: bool = True
    reason: str = ""
    notes: Sequence[str | None] = ()

    def kills(self) -> str:
        """Return the column of the kills."""
        *killed, _ = self.training.starts
        by_step = all(start.steps for start in killed)
        shown = [
            f"{start.killed_by.name} at "
            + ("step " if by_step and number == 0 else "")
            + (f"{max(start.steps)}" if by_step else f"{start.end_s:.1f} s")
            + (f" ({note})" if note else "")
            for number, (start, note) in enumerate(zip(killed, self.notes, strict=True))
            if start.killed_by
        ]
        if len(killed) + 1 < len(self.case.processes):
            shown.append(f"ended before kill {len(killed) + 1}")
        return ", ".join(shown) or "undisturbed"

    def row(self, first: FileComparison, tolerance: float) -> str:
        """Return the row of the training in the table."""
        if self.comparison.difference:
            verdict = "DIFFERENT"
        elif self.comparison.digest == first.digest:
            verdict = "same"
        else:
            verdict = f"within {tolerance:g}"
        return row(self.case, self.kills(), self.comparison.digest[:16], verdict, _KILLS_WIDTH)


def drill_script(request: DrillRequest, draw: random.Random) -> Iterator[str]:
    """Train the script with each schedule; yield the table line by line.

    Raises:
        Failure: a training failed, with its exit code.
        Failure: the files differ, or nothing shows that a training has resumed.
    """
    with drill_folder("drill run") as folder:
        yield from _Drill(request, folder, UserFolder(Path.cwd(), folder)).lines(draw)


@dataclass
class _Drill:
    request: DrillRequest
    folder: Path
    user: UserFolder
    outcomes: list[Outcome] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def lines(self, draw: random.Random) -> Iterator[str]:
        """Yield the messages, the table and the conclusion."""
        yield from self.user.messages
        request = self.request
        case, *cases = script_schedules(request.counts, request.kills)
        reference = yield from self._reference(case)
        first = self._compared(reference, reference)
        if first.difference:
            raise WrongUse(f"the undisturbed training: {first.difference}")
        self.outcomes.append(Outcome(case, reference, first))
        yield f"{request.file}\n  {'processes':<18} {'':<{_KILLS_WIDTH}} digest"
        yield self.outcomes[0].row(first, request.tolerance)
        for number, case in enumerate(cases, 1):
            signals = kill_signals(request.kills, number - len(request.counts))
            outcome = self._outcome(case, signals, draw)
            yield outcome.row(first, request.tolerance)
            # If a kill came after the end of the training, the script may ignore SIGTERM. An early
            # kill alone shows little, so train once more with kills that cannot be ignored.
            is_same = outcome.comparison.difference is None
            if is_same and not outcome.resumed and FINISHED in outcome.notes:
                yield f"  {FINISHED}: {MEANINGS[FINISHED]}; so it trains again, with SIGKILL alone"
                outcome = self._outcome(case, [SIGKILL] * request.kills, draw)
                yield outcome.row(first, request.tolerance)
            self.outcomes.append(outcome)
        self._check_bits()
        self._check_resumed()
        yield from self._conclusion()

    def _reference(self, case: KillSchedule) -> Generator[str, None, Training]:
        """Return an undisturbed training, and yield which files it left out.

        The copy of the user's folder may have files that the script writes itself, such as an old
        checkpoint, which the script could load. They are left out, and the training begins again.
        """
        while found := (training := self._trained("case-0", case)).overwritten():
            shutil.rmtree(training.folder)
            names = [name.removeprefix(f"{WORK}/") for name in found]
            self.user.excluded.update(names)
            yield (
                f"{', '.join(names)} in the current folder: left out, because the script writes "
                "such files"
            )
        return training

    def _trained(self, name: str, case: KillSchedule, kills: Iterable[Kill] = ()) -> Training:
        """Train in a new copy of the user's folder.

        Raises:
            Failure: the training failed.
            WrongUse: the user's folder was changed.
        """
        folder = self.folder / name
        training = Training(
            folder,
            lambda count: self.request.arguments(folder, count, self.user),
            self.request.file,
        )
        self.user.copy(folder / WORK)
        training.train(case.processes, kills)
        if changed := self.user.changed():
            raise WrongUse(
                f"{', '.join(changed[:4])} changed in the current folder during the drill: let the "
                "script write to the run folder ({run} or TRAINBOX_RUN), and edit nothing meanwhile"
            )
        return training

    def _compared(self, reference: Training, training: Training) -> FileComparison:
        files = ((reference.output, reference.folder), (training.output, training.folder))
        return compare(*files, self.request.tolerance, self.request.ignored)

    def _outcome(
        self, case: KillSchedule, signals: Sequence[Signals], draw: random.Random
    ) -> Outcome:
        """Train, compare with the undisturbed training, and decide whether it has resumed."""
        reference, kills = self.outcomes[0].training, list[Kill]()
        if len(case.processes) > 1:
            moments = due(kill_shares(len(signals), draw), reference.starts[0])
            kills = list(zip(moments, signals, strict=True))
        training = self._trained(f"case-{next(self.numbers)}", case, kills)
        comparison = self._compared(reference, training)
        if not kills:
            return Outcome(case, training, comparison)

        def is_final(copy: Path) -> bool:
            files = ((training.output, training.folder), (copy, training.folder))
            return compare(*files, 0.0, self.request.ignored).difference is None

        last = case.processes[len(training.starts) - 1]
        undisturbed = next(
            outcome.training.starts[0]
            for outcome in self.outcomes
            if outcome.case.processes == (last,)
        )
        return Outcome(case, training, comparison, *resumption(training, undisturbed, is_final))

    def _check_bits(self) -> None:
        """Check that the files agree.

        Raises:
            Failure: they differ. It names the first difference, and what can cause it.
        """
        first = self.outcomes[0].case
        for outcome in self.outcomes:
            if not (what := outcome.comparison.difference):
                continue
            if len(outcome.case.processes) == 1:
                message = (
                    f"the undisturbed training on {outcome.case} processes differs from the one "
                    f"on {first}: {what}; this is the number of processes and not the resume: give "
                    "a --tolerance, or drill each number by itself"
                )
            elif repeated := self._compared(
                self.outcomes[0].training, self._trained("again", first)
            ).difference:
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
        for outcome in self.outcomes:
            if not outcome.resumed:
                raise Failure(
                    f"resume not shown, in the training {outcome.case}: {outcome.reason}",
                    exit_code=ExitCode.DIFFERENT,
                )

    def _conclusion(self) -> Iterator[str]:
        """Yield the evidence of the resumes, the meanings of the notes, and the comparison."""
        for outcome in self.outcomes:
            if outcome.reason:
                yield f"  resumed, {outcome.case}: {outcome.reason}"
        for note in dict.fromkeys(note for outcome in self.outcomes for note in outcome.notes):
            if note:
                yield f"  {note}: {MEANINGS[note]}"
        comparisons = [outcome.comparison for outcome in self.outcomes]
        digests = {comparison.digest for comparison in comparisons}
        ignored = self.request.ignored
        without = f", without {', '.join(ignored)} (--ignore)" if ignored else ""
        if len(digests) == 1:
            yield f"  the same bits in all {len(comparisons)} trainings{without}: {digests.pop()}"
            return
        largest = max(comparison.largest for comparison in comparisons)
        yield (
            f"  all {len(comparisons)} trainings agree within {self.request.tolerance:g}{without}; "
            f"the largest difference is {largest:.3g}"
        )


def due(shares: Sequence[float], undisturbed: Start) -> list[Due]:
    """Return a function for each of the kills, which tells when a start has reached its share.

    If the training reports steps, the share counts steps. Otherwise it counts the time since the
    start has written its first file, because a kill before the first checkpoint shows nothing.
    """
    steps = max(undisturbed.steps, default=0)
    saves = undisturbed.first_s <= _SAVED_BY * undisturbed.last_s

    def moment(number: int) -> Due:
        share, before = shares[number], shares[number - 1] if number else 0.0
        step = max(number + 1, round(share * steps))
        delay_s = (share - before) * (undisturbed.last_s - undisturbed.first_s)
        if not saves:  # each start begins with the first step
            delay_s = share * undisturbed.last_s

        def is_due(now: StartProgress) -> bool:
            begin_s = now.first_s if saves else 0.0
            if begin_s is None:
                return False
            if steps > len(shares) + 1:
                return now.step >= step
            return now.elapsed_s >= begin_s + delay_s

        return is_due

    return [moment(number) for number in range(len(shares))]
