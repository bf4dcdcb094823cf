"""The drill of any script: its training resumes after kills, and its result stays the same.

The drill starts `trainbox run SCRIPT`, undisturbed and with random kills, and compares a file.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM

from entrypoint.drill import schedule
from entrypoint.drill.compare import FileComparison, compare
from entrypoint.drill.folder import version_of
from entrypoint.drill.schedule import KillSchedule, kill_shares, kill_signals, script_schedules
from entrypoint.drill.training import STARTED_OVER, TOO_LATE, Kill, StepTimes, Training, moments
from trainbox.contract.errors import ExitCode, Failure, WrongUse
from trainbox.contract.temporary import keep, temporary_folder

# A file that has its last values before this share of the training does not show the training.
_EARLY = 0.5
# What a script has done instead of saving at SIGTERM.
_IGNORED, _FINISHED = "ignored", "finished"
_KILLS_WIDTH = 50


@dataclass(frozen=True)
class DrillRequest:
    """The script, the processes and the file of a drill.

    In `device`, the text {processes} is replaced by a number. `script` are the last arguments of
    `trainbox run`.
    """

    script: tuple[str, ...]
    device: tuple[str, ...]
    file: str
    counts: tuple[int, ...]
    kills: int
    tolerance: float

    def arguments(self, folder: Path, count: int) -> list[str]:
        """Return the arguments of `trainbox` for a start on `count` processes."""
        device = [argument.replace("{processes}", str(count)) for argument in self.device]
        return [
            "run",
            *device,
            "--nnodes",
            "1",
            "--runs-dir",
            str(folder),
            "--run",
            "run",
            *self.script,
        ]


@dataclass(frozen=True)
class Outcome:
    """A training of the drill, and the comparison of its file with that of the first training."""

    case: KillSchedule
    training: Training
    comparison: FileComparison
    ended_early: bool = False

    def kills(self) -> str:
        """Return the column of the kills."""
        kills = self.training.kills
        if len(self.case.processes) == 1:
            return "undisturbed"
        if not kills:
            return "ended before kill 1"
        by_step = all(kill.reported for kill in kills)
        shown = [
            f"{kill.by.name} at "
            + ("step " if by_step and number == 0 else "")
            + (f"{max(kill.reported)}" if by_step else f"{kill.after_s:.1f} s")
            + (f" ({note})" if (note := self._note(kill)) else "")
            for number, kill in enumerate(kills)
        ]
        late = f"; ended before kill {len(kills) + 1}" if self.ended_early else ""
        return f"{', '.join(shown)}{late}"

    def did_not_stop(self) -> bool:
        """Return whether the script has trained on after a SIGTERM."""
        return any(self._note(kill) in (_IGNORED, _FINISHED) for kill in self.training.kills)

    def _note(self, kill: Kill) -> str | None:
        """Return what is unusual about a kill."""
        if kill.ignored:
            return _IGNORED
        fault = self.training.fault(kill)
        return _FINISHED if fault == TOO_LATE and kill.by == SIGTERM else fault

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
        Failure: a training failed, with its exit code, or nothing was tested.
        Failure: the files differ.
    """
    yield f"{request.file}\n  {'processes':<18} {'':<{_KILLS_WIDTH}} digest"
    with temporary_folder("drill-") as folder:
        try:
            yield from _drilled(request, folder, draw)
        except Failure as error:
            keep(folder)
            error.args = (f"drill run: {error} (kept: {folder})",)
            raise


def _drilled(request: DrillRequest, folder: Path, draw: random.Random) -> Iterator[str]:
    """Yield the lines of the table below its heading."""
    case, *cases = script_schedules(request.counts, request.kills)
    reference = _training(request, folder / "case-0")
    pace = reference.undisturbed(case.processes[0])
    first = _examined(reference, pace)
    outcomes = [Outcome(case, reference, first)]
    yield outcomes[0].row(first, request.tolerance)
    for number, case in enumerate(cases, 1):
        training = _training(request, folder / f"case-{number}")
        ended_early = False
        if len(case.processes) == 1:
            training.undisturbed(case.processes[0])
        else:
            signals = kill_signals(request.kills, number - len(request.counts))
            if any(outcome.did_not_stop() for outcome in outcomes):
                signals = [SIGKILL] * request.kills
            drawn = moments(kill_shares(request.kills, draw), pace, signals)
            ended_early = not training.killed(case.processes, drawn)
        comparison = _compared(reference, training, request.tolerance)
        outcomes.append(Outcome(case, training, comparison, ended_early))
        yield outcomes[-1].row(first, request.tolerance)
    different = [outcome for outcome in outcomes if outcome.comparison.difference]
    if different:
        again = _training(request, folder / "again")
        raise Failure(_cause(different, reference, again, request), exit_code=ExitCode.DIFFERENT)
    _check_effective(outcomes, pace)
    yield _conclusion(outcomes, request.tolerance)
    if any(outcome.did_not_stop() for outcome in outcomes):
        yield (
            "  the script did not stop at SIGTERM: a job that is stopped loses its work since the "
            "last checkpoint"
        )


def _training(request: DrillRequest, folder: Path) -> Training:
    folder.mkdir()
    return Training(lambda count: request.arguments(folder, count), folder, request.file)


def _examined(reference: Training, pace: StepTimes) -> FileComparison:
    """Examine the file of the first training.

    Raises:
        Failure: the file cannot be compared, or did not change during the training.
    """
    try:
        first = compare(reference.output)
    except WrongUse as error:
        raise WrongUse(f"the undisturbed training: {error}") from error
    written_again = reference.early_version != version_of(reference.output)
    if written_again and reference.early_s <= _EARLY * pace.duration_s:
        # A copy that was made during a write may be incomplete.
        with contextlib.suppress(WrongUse):
            if compare(reference.early, reference.output).difference is None:
                raise Failure(
                    f"{reference.file} is the same after {reference.early_s:.1f} s and at the end "
                    f"of {pace.duration_s:.1f} s, so nothing was trained: compare a file that the "
                    "training changes",
                )
    return first


def _compared(reference: Training, training: Training, tolerance: float) -> FileComparison:
    try:
        return compare(reference.output, training.output, tolerance)
    except WrongUse as error:
        return FileComparison("-" * 16, str(error))


def _cause(
    different: Sequence[Outcome], reference: Training, again: Training, request: DrillRequest
) -> str:
    """Describe the first difference, and whether it also occurs without a kill."""
    outcome = different[0]
    what = outcome.comparison.difference
    counts = outcome.case.processes
    if len(counts) == 1:
        return (
            f"the undisturbed training on {counts[0]} processes differs from that on "
            f"{request.counts[0]}: {what}; this is the number of processes and not the resume: "
            "give a --tolerance, or drill each number by itself"
        )
    again.undisturbed(request.counts[0])
    if repeated := _compared(reference, again, request.tolerance).difference:
        return (
            f"two undisturbed trainings differ: {repeated}; this is the script and not the resume: "
            "seed all its random numbers, or give a --tolerance"
        )
    return (
        f"the training {outcome.case} differs from the undisturbed one: {what}; two undisturbed "
        "trainings are the same, so its checkpoint does not have all of its state"
    )


def _check_effective(outcomes: Sequence[Outcome], pace: StepTimes) -> None:
    """Check that at least one training resumed after a kill.

    Raises:
        Failure: no training did.
    """
    faults = {
        outcome.training.fault(kill) for outcome in outcomes for kill in outcome.training.kills
    }
    if None in faults:
        return
    if STARTED_OVER in faults:
        raise Failure(
            "after each kill the steps began again with the first one, so no resume was tested: "
            "let the script load its checkpoint from the run folder ({run} or TRAINBOX_RUN)",
        )
    writes = f"it wrote files from {pace.first_s:.1f} s to {pace.last_s:.1f} s"
    raise Failure(
        "no start was killed before its training was finished, so no resume was tested "
        f"(undisturbed, {writes} of {pace.duration_s:.1f} s): write checkpoints to the run folder "
        "({run} or TRAINBOX_RUN), or train longer",
    )


def _conclusion(outcomes: Sequence[Outcome], tolerance: float) -> str:
    comparisons = [outcome.comparison for outcome in outcomes]
    digests = {comparison.digest for comparison in comparisons}
    if len(digests) == 1:
        return f"  the same bits in all {len(outcomes)} trainings: {digests.pop()}"
    largest = max(comparison.largest for comparison in comparisons)
    return (
        f"  all {len(outcomes)} trainings agree within {tolerance:g}; the largest difference is "
        f"{largest:.3g}"
    )
