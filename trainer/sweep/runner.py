"""Train the trials of a study on the slots of this machine, each with a worker process."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainbox.errors import (
    DeviceMissing,
    ExitCode,
    Preempted,
    Stopped,
    StorageFailure,
    WrongUse,
)
from trainbox.folders.lease import is_leased
from trainer.sweep import results
from trainer.sweep.grid import Trial, trial_folder
from trainer.sweep.slots import Slot
from trainer.sweep.study import Study
from trainer.sweep.trial_work import Work
from trainer.system.signals import StopRequest

POLL_S = 0.2
_LINE_EVERY_S = 10.0
_BEAT_EVERY_S = 10.0
_START_S = 600.0  # for a worker to import torch and compute something
_STARTS = 3
_BUSY_S = 10.0  # between two looks at a trial whose folder another process uses
# The same bits would fail in the same way.
_NEVER_RETRIED = (ExitCode.WRONG_USE, ExitCode.NOT_FINITE)


@dataclass(frozen=True)
class Waiting:
    """A trial that this machine trains again at `from_s` or later.

    `visible` is the GPU on which it failed, or None if it did not fail.
    """

    trial: Trial
    visible: str | None
    from_s: float


class SweepRun:
    """This machine's share of a sweep in `folder`."""

    def __init__(
        self,
        study: Study,
        folder: Path,
        work: Work,
        slots: Sequence[Slot],
        retries: int,
        trial_minutes: float | None,
        stop: StopRequest,
    ) -> None:
        self._study, self._folder, self._work = study, folder, work
        self._slots, self._stop = list(slots), stop
        self._retries, self._trial_minutes = retries, trial_minutes
        self._waiting: list[Waiting] = []
        self._beat_at = 0.0
        # Counts this start only: the data of an earlier start may be missing now.
        self._succeeded = False
        self._saved, self._left_at_start = False, study.unfinished()
        # The first trial that reported wrong use. Another trial shows whether all of them would.
        self._suspect: tuple[Trial, str] | None = None
        self._progress = SweepProgress(study.total, study.ended()[0])

    def run(self) -> None:
        """Train until every trial has ended, on this machine or on others.

        Raises:
            Stopped: stopped by a signal; running trials are saved and given back. It is
                Preempted if a trial has ended or saved something new meanwhile.
            DeviceMissing: no slot is left to train on.
            StorageFailure: a trial reports that nothing can be written.
            WrongUse: two trials report wrong use before one succeeds, or the only trial does.
        """
        try:
            for slot in self._slots if self._count() else []:
                slot.start()
            while not self._stop and self._count():
                self._beat()
                self._assign()
                self._handle_answers()
                self._check_workers()
            if self._stop:
                # Ask the workers to save their trials and stop, and wait for them.
                busy = [slot for slot in self._slots if slot.trial is not None]
                for slot in busy:
                    if slot.process is not None:
                        slot.process.terminate()
                for slot in busy:
                    while slot.trial is not None:
                        self._handle_next(slot)
                total, left = self._study.total, self._study.unfinished()
                kind = Preempted if self._saved or left < self._left_at_start else Stopped
                raise kind(
                    f"stopped by {self._stop.signal_name} with {total - left} of {total} "
                    "trials done: repeat the command to resume"
                )
        finally:
            self._release()

    def _count(self) -> int:
        """Show the progress, and return the number of trials that have not ended."""
        ended, failures = self._study.ended()
        running = sum(slot.trial is not None for slot in self._slots)
        self._progress.show(ended, running, failures)
        return self._study.total - ended

    def _beat(self) -> None:
        """Every few seconds, exchange heartbeats with other processes and write results.csv."""
        if time.monotonic() > self._beat_at:
            self._beat_at = time.monotonic() + _BEAT_EVERY_S
            self._study.beat()
            self._study.give_back_of_the_lost()
            results.write_csv(self._folder, self._study.records())

    # Start trials

    def _assign(self) -> None:
        """Start a trial on each free slot.

        Raises:
            WrongUse: the only trial left has reported wrong use.
        """
        for slot in self._slots:
            if slot.ready and slot.trial is None and (trial := self._next_for(slot)) is not None:
                self._train(slot, trial)
        if (
            self._suspect
            and not self._waiting
            and all(slot.ready and slot.trial is None for slot in self._slots)
        ):
            raise _wrong_use(*self._suspect)

    def _next_for(self, slot: Slot) -> Trial | None:
        """Return the next trial for the slot, or None.

        A trial that failed on this GPU comes last, so that another GPU can take it first.
        """
        due = [entry for entry in self._waiting if entry.from_s <= time.monotonic()]
        first = min(due, key=lambda entry: entry.visible == slot.visible, default=None)
        if first is None or first.visible == slot.visible:
            trial = self._study.claim()
            if trial is not None or first is None:
                return trial
        self._waiting.remove(first)
        return first.trial

    def _train(self, slot: Slot, trial: Trial) -> None:
        """Train the trial on the slot, or let it wait while another process uses its folder."""
        run = trial_folder(self._folder, trial.number)
        if is_leased(run):
            self._waiting.append(Waiting(trial, None, time.monotonic() + _BUSY_S))
        else:
            slot.order(trial, self._work.order(trial, run))

    # Handle what the workers answer

    def _handle_answers(self) -> None:
        by_connection = {
            slot.connection: slot for slot in self._slots if slot.connection is not None
        }
        for connection in wait(list(by_connection), timeout=POLL_S):
            self._handle_next(by_connection[connection])  # type: ignore[index]

    def _handle_next(self, slot: Slot) -> None:
        """Handle the next answer of the slot's worker, or the worker's end."""
        answer = slot.receive()
        if answer is None:
            self._worker_ended(slot)
        else:
            self._handle(slot, answer)

    def _handle(self, slot: Slot, answer: Mapping[str, Any]) -> None:
        if "unusable" in answer:  # the worker has started
            if answer["unusable"] is None:
                slot.ready, slot.failed_starts = True, 0
            else:
                self._start_failed(slot, answer["unusable"])
        elif "step" in answer:  # the trial has validated, and waits for the pruner
            assert slot.trial is not None
            prune = not self._stop and self._study.should_prune(
                slot.trial, answer["step"], answer["metrics"]
            )
            slot.send({"prune": prune})
        else:
            self._trial_ended(slot, answer)

    def _trial_ended(self, slot: Slot, answer: Mapping[str, Any]) -> None:
        if slot.is_late:
            self._took_too_long(slot)
            return
        trial, code = slot.take_trial(), answer["code"]
        if code == 0:
            self._trial_succeeded(trial, answer, time.monotonic() - slot.since_s)
            if answer.get("failed_allocations"):
                slot.restart()  # cuDNN keeps other algorithms, and so other bits, in this process
        elif code == ExitCode.PREEMPTED and self._stop:
            self._saved |= answer.get("saved", False)
            self._study.give_back(trial)
        elif code == ExitCode.STORAGE:
            self._study.give_back(trial)
            raise StorageFailure(f"trial {trial.number}: {answer['message']}")
        else:
            slot.restart()  # the next trial starts without the leftovers of this one
            if code == ExitCode.PREEMPTED:
                cause = (
                    f"another program or the task sent its process a signal: {answer['message']}"
                )
                self._trial_failed(slot, trial, cause)
            else:
                self._trial_failed(slot, trial, answer["message"], code)

    def _trial_succeeded(self, trial: Trial, answer: Mapping[str, Any], seconds: float) -> None:
        """Record the trial. If another trial is suspected of wrong use, record that it failed.

        Raises:
            WrongUse: no trial has the metric that trials are compared by.
        """
        record = self._study.pruned if answer.get("pruned") else self._study.done
        try:
            record(trial, answer["metrics"], seconds)
        except WrongUse as error:
            if any(record.state == "done" for record in self._study.records()):
                self._failed(trial, str(error))
                return
            self._study.give_back(trial)
            raise _wrong_use(trial, str(error)) from error
        self._succeeded = True
        if self._suspect:
            (suspect, message), self._suspect = self._suspect, None
            self._failed(suspect, message)

    def _trial_failed(
        self, slot: Slot, trial: Trial, message: str, code: int = ExitCode.UNEXPECTED
    ) -> None:
        """Retry the trial, or record that it failed.

        Raises:
            WrongUse: this is the second trial that reports wrong use, and no trial has succeeded.
        """
        if code == ExitCode.WRONG_USE and not self._succeeded:
            if self._suspect:
                self._study.give_back(trial)
                raise _wrong_use(*self._suspect)
            self._suspect = trial, message
        elif code not in _NEVER_RETRIED and trial.attempts < self._retries:
            self._progress.log(
                f"trial {trial.number} failed on {slot.name} and is retried: {message}"
            )
            self._waiting.append(Waiting(self._study.attempted(trial), slot.visible, 0.0))
        else:
            self._failed(trial, message, f" on {slot.name}")

    def _failed(self, trial: Trial, message: str, where: str = "") -> None:
        """Record and log that the trial failed."""
        self._study.failed(trial, message)
        self._progress.log(f"trial {trial.number} failed{where}: {message}")

    # Handle workers that do not answer

    def _check_workers(self) -> None:
        """Replace workers that have ended, and workers that take too long."""
        minutes = self._trial_minutes
        for slot in list(self._slots):
            taken_s = time.monotonic() - slot.since_s
            if slot.has_ended():
                self._worker_ended(slot)
            elif slot.trial is not None and minutes is not None and taken_s > 60 * minutes:
                if taken_s > 60 * minutes + self._work.save_s:
                    self._took_too_long(slot)
                elif not slot.is_late and slot.process is not None:
                    slot.is_late = True
                    slot.process.terminate()
            elif not slot.ready and taken_s > _START_S:
                self._start_failed(slot, f"its process did not start within {_START_S:.0f} s")

    def _took_too_long(self, slot: Slot) -> None:
        trial = slot.take_trial()
        slot.restart()
        cause = f"it took longer than --trial-minutes {self._trial_minutes:g}{slot.last_output()}"
        self._trial_failed(slot, trial, cause)

    def _worker_ended(self, slot: Slot) -> None:
        """Replace a worker that has ended. Its trial has failed."""
        trial, slot.trial = slot.trial, None
        cause = slot.end()
        if trial is None and not slot.ready:
            self._start_failed(slot, f"{cause} at its start")
            return
        slot.start()
        if trial is not None:
            self._trial_failed(slot, trial, f"{cause}{slot.last_output()}")

    def _start_failed(self, slot: Slot, why: str) -> None:
        """Start the worker again, or give up the slot after several failures.

        Raises:
            DeviceMissing: this was the last slot.
        """
        slot.failed_starts += 1
        if slot.failed_starts < _STARTS:
            slot.restart()
            return
        slot.kill()
        self._slots.remove(slot)
        self._progress.log(
            f"{slot.name} is not used any more, since its worker cannot start: {why}"
        )
        if not self._slots:
            raise DeviceMissing(
                f"no usable device is left ({slot.name}: {why}): repeat the command on a machine "
                "with a working device"
            )

    def _release(self) -> None:
        """Kill the workers, give back all trials that have not ended, and write results.csv."""
        for slot in self._slots:
            slot.kill()
            if slot.trial is not None:
                self._study.give_back(slot.take_trial())
        for waiting in self._waiting:
            self._study.give_back(waiting.trial)
        if self._suspect:
            self._study.give_back(self._suspect[0])
        self._progress.close()
        results.write_csv(self._folder, self._study.records())


def _wrong_use(trial: Trial, message: str) -> WrongUse:
    """Return the failure that ends the sweep, with the settings of the trial."""
    point = ", ".join(f"{name}={value}" for name, value in trial.point.items())
    return WrongUse(f"trial {trial.number}{f' ({point})' if point else ''}: {message}")


class SweepProgress:
    """One bar for the whole sweep; without a terminal, a line every few seconds."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._first, self._begin = total, done, time.monotonic()
        self._line_at = time.monotonic() + _LINE_EVERY_S
        is_hidden = not sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=done, unit=" trials", dynamic_ncols=True, disable=is_hidden
        )

    def show(self, done: int, running: int, failures: int) -> None:
        """Show these numbers of trials."""
        text = f"{running} running, {failures} failed"
        if not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() > self._line_at:
            self._line_at = time.monotonic() + _LINE_EVERY_S
            speed = (done - self._first) / (time.monotonic() - self._begin)
            left = f", {(self._total - done) / speed:.0f} s left" if speed else ""
            self.log(
                f"{done} of {self._total} trials done, {text}, {60 * speed:.0f} per minute{left}"
            )

    def log(self, text: str) -> None:
        """Print the text in one line."""
        print_above_bar(" ".join(text.split()))

    def close(self) -> None:
        self._bar.close()


def print_above_bar(text: str) -> None:
    """Print the text to standard output, above the bar if there is one."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()
