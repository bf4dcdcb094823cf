"""The trials of a study: one worker process per slot, and one queue that feeds them.

A slot is a GPU, a part of a GPU, or some CPU threads.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainer.errors import (
    DeviceMissing,
    NetworkFailure,
    NotFinite,
    Preempted,
    StorageFailure,
    TrialsFailed,
    WrongUse,
)
from trainer.sweep.grid import Sweep
from trainer.sweep.study import Study, Trial, open_study, storage_failures
from trainer.system.hints import tensorboard
from trainer.system.signals import StopRequest

_POLL_S = 0.2
_BEAT_EVERY_S = 10.0
_LINE_EVERY_S = 10.0
_JOIN_S = 600.0
_START_S = 600.0  # for a worker to import torch and compute something
_STARTS = 3
_LAST_BREATH_S = 5.0
_BUSY_S = 10.0  # between two looks at a trial in whose folder another process trains
_LAST_LINES, _LAST_CHARACTERS = 3, 300
# the same bits would fail in the same way
_NOT_TRIED_AGAIN = (WrongUse.exit_code, NotFinite.exit_code)


@dataclass(frozen=True)
class Limits:
    """The number of retries of a failed trial, and the most minutes that one may take."""

    retries: int = 1
    trial_minutes: float | None = None


@dataclass
class Slot:
    """A place for one trial at a time; `visible` is its CUDA_VISIBLE_DEVICES."""

    name: str
    visible: str
    process: "subprocess.Popen[bytes] | None" = None
    connection: Connection | None = None
    ready: bool = False
    trial: Trial | None = None
    since_s: float = 0.0  # the order, or the start of a worker that is not ready yet
    failed_starts: int = 0
    log: Path = Path()
    log_from: int = 0  # where the log of this attempt begins, in bytes


@dataclass(frozen=True)
class _Waiting:
    """A trial that this machine tries again at `from_s` or later.

    Another GPU than `visible` takes it if there is one.
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
        data_dir: Path,
        slots: Sequence[Slot],
        limits: Limits,
        stop: StopRequest,
    ) -> None:
        self._study, self._folder, self._data_dir = study, folder, data_dir
        self._slots, self._limits, self._stop = list(slots), limits, stop
        self._waiting: list[_Waiting] = []
        self._beat_at = 0.0
        self._ended = study.total - study.unfinished()
        # Counts this start only: the data of an earlier start may be missing now.
        self._succeeded = False
        # The first trial that reported wrong use. Another trial shows whether all of them would.
        self._suspect: tuple[Trial, str] | None = None
        self._bar = _Progress(study.total, self._ended)

    def run(self) -> None:
        """Train until every trial has ended, on this machine or on others.

        Raises:
            Preempted: stopped by a signal; trials under way are saved and given back.
            DeviceMissing: no slot is left to train on.
            StorageFailure: a trial reports that nothing can be written.
            WrongUse: two trials report wrong use before one succeeds, or the only trial does.
        """
        try:
            for slot in self._slots if self._count() else []:
                self._start(slot)
            while not self._stop and self._count():
                self._beat()
                self._feed()
                self._listen()
                self._look_after()
            if self._stop:
                self._wind_up()
                total, left = self._study.total, self._study.unfinished()
                raise Preempted(
                    f"stopped by {self._stop.signal_name} with {total - left} of {total} "
                    "trials done: repeat the command to resume"
                )
        finally:
            for slot in self._slots:
                self._end(slot)
            for waiting in self._waiting:
                self._study.give_back(waiting.trial)
            if self._suspect:
                self._study.give_back(self._suspect[0])
            self._bar.close()

    def _count(self) -> int:
        self._ended, failures = self._study.ended()
        self._bar.show(self._ended, sum(slot.trial is not None for slot in self._slots), failures)
        return self._study.total - self._ended

    def _beat(self) -> None:
        if time.monotonic() > self._beat_at:
            self._beat_at = time.monotonic() + _BEAT_EVERY_S
            self._study.beat()
            self._study.give_back_of_the_lost()
            _write_results(self._study, self._folder)

    def _feed(self) -> None:
        for slot in self._slots:
            if slot.ready and slot.trial is None and (trial := self._next_for(slot)) is not None:
                self._order(slot, trial)
        if (
            self._suspect
            and not self._waiting
            and all(slot.ready and slot.trial is None for slot in self._slots)
        ):
            raise self._wrong_use(*self._suspect)  # there is no other trial to compare it with

    def _next_for(self, slot: Slot) -> Trial | None:
        """Return the next trial for the slot, or None.

        A trial that failed on this GPU comes last, so that another GPU can take it first.
        """
        due = [waiting for waiting in self._waiting if waiting.from_s <= time.monotonic()]
        chosen = next((waiting for waiting in due if waiting.visible != slot.visible), None)
        if chosen is None:
            trial = self._study.claim()
            if trial is not None or not due:
                return trial
            chosen = due[0]
        self._waiting.remove(chosen)
        return chosen.trial

    def _order(self, slot: Slot, trial: Trial) -> None:
        run = self._folder / f"trial-{trial.number:05d}"
        slot.trial, slot.log, slot.since_s = trial, run / "logs" / "output.log", time.monotonic()
        slot.log_from = slot.log.stat().st_size if slot.log.is_file() else 0
        sweep = self._study.sweep
        order = {
            "config": vars(sweep.trial_config(trial.point, trial.seed)),
            "run": str(run),
            "log": str(slot.log),
            "data_dir": str(self._data_dir),
            "pruned": sweep.pruner != "none",
            "swept": [*trial.point, "seed"],
        }
        self._tell(slot, order)

    def _tell(self, slot: Slot, order: Mapping[str, Any]) -> None:
        assert slot.connection is not None
        with contextlib.suppress(OSError):  # the worker has died: `_look_after` finds out
            slot.connection.send_bytes(json.dumps(order).encode())

    def _listen(self) -> None:
        by_connection = {
            slot.connection: slot for slot in self._slots if slot.connection is not None
        }
        for connection in wait(list(by_connection), timeout=_POLL_S):
            slot = by_connection[connection]  # type: ignore[index]
            if (answer := self._answer(slot)) is not None:
                self._hear(slot, answer)

    def _answer(self, slot: Slot) -> dict[str, Any] | None:
        """Return a worker's answer, or None if the worker has died."""
        assert slot.connection is not None
        try:
            answer: dict[str, Any] = json.loads(slot.connection.recv_bytes())
        except (EOFError, OSError):
            self._died(slot)
            return None
        return answer

    def _hear(self, slot: Slot, answer: Mapping[str, Any]) -> None:
        if "unusable" in answer:
            if answer["unusable"] is None:
                slot.ready, slot.failed_starts = True, 0
            else:
                self._failed_start(slot, answer["unusable"])
        elif "step" in answer:
            assert slot.trial is not None
            self._tell(
                slot,
                {
                    "prune": not self._stop
                    and self._study.should_prune(slot.trial, answer["step"], answer["metrics"])
                },
            )
        else:
            self._trial_ended(slot, answer)

    def _look_after(self) -> None:
        """Replace workers that have died and workers that take too long.

        A child of a dead worker can hold the connection open, so that `wait` reports nothing.
        """
        minutes = self._limits.trial_minutes
        for slot in list(self._slots):
            taken_s = time.monotonic() - slot.since_s
            if (
                slot.process is not None
                and slot.process.poll() is not None
                and slot.connection
                and not slot.connection.poll()
            ):
                self._died(slot)
            elif slot.trial is not None and minutes is not None and taken_s > 60 * minutes:
                trial, slot.trial = slot.trial, None
                self._restart(slot)
                self._failed(
                    slot,
                    trial,
                    f"not done within --trial-minutes {minutes:g}{_last_words_of(slot)}",
                    1,
                )
            elif not slot.ready and taken_s > _START_S:
                self._failed_start(slot, f"its process did not start within {_START_S:.0f} s")

    def _trial_ended(self, slot: Slot, answer: Mapping[str, Any]) -> None:
        trial, slot.trial = slot.trial, None
        assert trial is not None
        if answer["code"] == Preempted.exit_code:
            if self._stop:
                self._study.give_back(trial)
                return
            self._restart(slot)  # this worker would stop in each further trial, too
            self._failed(
                slot,
                trial,
                f"another program or the task sent its process a signal: {answer['message']}",
                1,
            )
            return
        if answer["code"] == 0:
            self._settle_suspect()
            record = self._study.pruned if answer.get("pruned") else self._study.done
            try:
                record(trial, answer["metrics"], answer["seconds"])
            except WrongUse:
                self._study.give_back(trial)
                raise
            return
        if answer["code"] == StorageFailure.exit_code:
            self._study.give_back(trial)
            raise StorageFailure(f"trial {trial.number}: {answer['message']}")
        self._restart(slot)  # the next trial starts without the leftovers of this one
        if answer.get("busy"):
            self._waiting.append(_Waiting(trial, None, time.monotonic() + _BUSY_S))
        else:
            self._failed(slot, trial, answer["message"], answer["code"])

    def _died(self, slot: Slot) -> None:
        trial, slot.trial = slot.trial, None
        assert slot.process is not None
        # Let the worker end by itself, before `_end` kills it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            slot.process.wait(_LAST_BREATH_S)
        self._end(slot)
        code = slot.process.returncode
        how = (
            f"its process was killed by {_signal_name(-code)}"
            if code < 0
            else f"its process exited with code {code}"
        )
        if trial is None and not slot.ready:
            self._failed_start(slot, f"{how} at its start")
            return
        self._start(slot)
        if trial is not None:
            self._failed(slot, trial, f"{how}{_last_words_of(slot)}", 1)

    def _failed(self, slot: Slot, trial: Trial, message: str, code: int) -> None:
        if code == WrongUse.exit_code and not self._succeeded:
            if self._suspect:  # two different trials failed: probably every trial would
                self._study.give_back(trial)
                raise self._wrong_use(*self._suspect)
            self._suspect = trial, message
            return
        if code in _NOT_TRIED_AGAIN or trial.attempts >= self._limits.retries:
            self._study.failed(trial, message)
            self._bar.say(f"trial {trial.number} failed on {slot.name}: {message}")
            return
        self._bar.say(f"trial {trial.number} failed on {slot.name} and is tried again: {message}")
        self._waiting.append(_Waiting(self._study.attempted(trial), slot.visible, 0.0))

    def _settle_suspect(self) -> None:
        """Record the suspect as failed: another trial has succeeded, so its settings are wrong."""
        self._succeeded = True
        if self._suspect:
            (trial, message), self._suspect = self._suspect, None
            self._study.failed(trial, message)
            self._bar.say(f"trial {trial.number} failed: {message}")

    def _wrong_use(self, trial: Trial, message: str) -> WrongUse:
        point = ", ".join(f"{name}={value}" for name, value in trial.point.items())
        return WrongUse(f"trial {trial.number}{f' ({point})' if point else ''}: {message}")

    def _failed_start(self, slot: Slot, why: str) -> None:
        slot.failed_starts += 1
        if slot.failed_starts < _STARTS:
            self._restart(slot)
            return
        self._end(slot)
        self._slots.remove(slot)
        self._bar.say(f"{slot.name} cannot be used and is set aside: {why}")
        if not self._slots:
            raise DeviceMissing(
                f"nothing is left to train on ({slot.name}: {why}): repeat the command where "
                "a device works"
            )

    def _restart(self, slot: Slot) -> None:
        self._end(slot)
        self._start(slot)

    def _start(self, slot: Slot) -> None:
        ours, theirs = Pipe()
        slot.process = start_worker(
            theirs,
            {"CUDA_VISIBLE_DEVICES": slot.visible, "TRAINBOX_REASON": f"sweep -> {slot.name}"},
        )
        theirs.close()
        slot.connection, slot.ready, slot.trial, slot.since_s = ours, False, None, time.monotonic()

    def _end(self, slot: Slot) -> None:
        """Kill the slot's worker and its children, and give its trial back."""
        if slot.connection is not None:
            slot.connection.close()
            slot.connection = None
        if slot.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(slot.process.pid, signal.SIGKILL)
            slot.process.wait()
        if slot.trial is not None:
            self._study.give_back(slot.trial)
            slot.trial = None

    def _wind_up(self) -> None:
        """Ask the workers to save their trials and stop, and wait for them."""
        for slot in self._slots:
            if slot.trial is not None and slot.process is not None:
                slot.process.terminate()
        for slot in list(self._slots):
            while slot.trial is not None and (answer := self._answer(slot)) is not None:
                self._hear(slot, answer)


def start_worker(connection: Connection, variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a worker on its end of the connection, with `variables` in its environment."""
    return subprocess.Popen(
        # -P keeps a trainer.py of the current folder out.
        [sys.executable, "-P", "-m", "trainer.sweep.worker", str(connection.fileno())],
        env={**os.environ, **variables},
        pass_fds=(connection.fileno(),),
        start_new_session=True,  # the worker and its children can be killed together
    )


def run_sweep(
    sweep: Sweep,
    runs_dir: Path,
    name: str | None,
    storage: str | None,
    data_dir: Path,
    limits: Limits,
    retry_failed: bool,
    joins: bool,
    stop: StopRequest,
) -> None:
    """Do this machine's share of a sweep on the launcher's slots, and show the results.

    The environment variable TRAINBOX_SLOTS lists the slots.

    Raises:
        TrialsFailed: some trials failed; each is recorded with its error.
        Failure: as for `SweepRun.run`.
    """
    name = name or f"{sweep.config.task.rpartition(':')[2].lower()}-sweep-{sweep.fingerprint()}"
    folder = runs_dir / name
    with storage_failures(storage, folder):
        folder.mkdir(parents=True, exist_ok=True)
        if joins:
            _wait_for(storage, folder, stop)
        study = open_study(storage, folder, name, sweep)
        if retry_failed:
            study.retry_failed()
        _say(_header(study, folder, sweep))
        slots = [
            Slot(*slot)
            for slot in json.loads(os.environ.get("TRAINBOX_SLOTS", '[["the CPU", ""]]'))
        ]
        SweepRun(study, folder, data_dir, slots, limits, stop).run()
        if not joins:
            _show_all(study, folder, storage)
    if not joins and (failed := [record for record in study.records() if record.state == "failed"]):
        first = failed[0]
        raise TrialsFailed(
            f"{len(failed)} of {study.total} trials failed; the first, trial "
            f"{first.number}: {first.message} "
            "(--retry-failed trains them once more)"
        )


def show(
    folder: Path, storage: str | None, metric: str | None, as_csv: bool, figure: Path | None
) -> str:
    """Return the results of the sweep in `folder` as a table or as CSV, or draw them into `figure`.

    Raises:
        WrongUse: no such sweep, or no such metric.
        StorageFailure: the sweep's record is damaged.
    """
    from trainer.sweep import results

    if storage is None and not (folder / "study.journal").is_file():
        raise WrongUse(
            f"{folder} contains no sweep: give the name of a folder in --runs-dir, or the "
            "sweep's --storage"
        )
    with storage_failures(storage, folder):
        study = open_study(storage, folder, folder.absolute().name, None)
        records = study.records()
    if as_csv:
        return results.as_csv(records)
    asked = metric or study.sweep.metric
    metric = results.metric_of(records, asked)
    rows = results.rows(records, metric)
    if figure is None:
        drawn = study.sweep.sampler != "grid"
        table = results.table(results.best_first(rows, metric, asked) if drawn else rows, metric)
        return "\n".join(filter(None, [table, results.best_line(rows, metric, asked, folder)]))
    try:
        results.figure(rows, records, metric, study.sweep.sampler != "grid").savefig(figure)
    except (OSError, ValueError) as error:
        raise WrongUse(f"--figure {figure}: {error}") from error
    return f"drawn into {figure}"


def _header(study: Study, folder: Path, sweep: Sweep) -> str:
    earlier = ""
    if sweep.total < study.total:
        earlier = f" ({sweep.total} asked for now, {study.total} before)"
    rows = {
        "sweep": str(folder),
        "plan": os.environ.get("TRAINBOX_REASON", "1 trial at a time"),
        **({"settings": settings} if (settings := os.environ.get("TRAINBOX_SETTINGS")) else {}),
        "trials": f"{study.total}, {study.unfinished()} to do{earlier}",
    }
    return "\n".join(f"{name:<10} {value}" for name, value in rows.items())


def _show_all(study: Study, folder: Path, storage: str | None) -> None:
    """Print the table; write results.csv and the picture, also for TensorBoard.

    Nothing here imports torch. matplotlib draws the picture in about a second of CPU time.
    """
    from trainer.records.tensorboard import write_picture

    _say(show(folder, storage, None, False, None))
    _write_results(study, folder)
    show(folder, storage, None, False, folder / "sweep.png")
    write_picture(folder, "sweep", folder / "sweep.png")
    _say(
        f"files      {folder}/results.csv, sweep.png; to look at all trials: {tensorboard(folder)}"
    )


def _write_results(study: Study, folder: Path) -> None:
    """Replace results.csv atomically."""
    from trainer.sweep import results

    part = folder / f".results-{os.getpid()}.part"
    part.write_text(results.as_csv(study.records()), encoding="utf-8")
    part.replace(folder / "results.csv")


def _wait_for(storage: str | None, folder: Path, stop: StopRequest) -> None:
    """Wait until another machine has started the sweep.

    Raises:
        NetworkFailure: no machine has started the sweep in time.
    """
    deadline = time.monotonic() + _JOIN_S
    said = False
    while True:
        if storage is not None or (folder / "study.journal").is_file():
            with contextlib.suppress(WrongUse):
                open_study(storage, folder, folder.name, None)
                return
        if stop or time.monotonic() > deadline:
            raise NetworkFailure(
                f"--worker: no machine started the sweep {folder} within {_JOIN_S:.0f} s: start "
                "it without --worker on one machine"
            )
        if not said:
            _say(f"waiting for another machine to start {folder}")
            said = True
        time.sleep(_POLL_S)


class _Progress:
    """One bar for the whole sweep; without a terminal, a line every few seconds."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._first, self._begin = total, done, time.monotonic()
        self._line_at = time.monotonic() + _LINE_EVERY_S
        self._bar = (
            tqdm(total=total, initial=done, unit=" trials", dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )

    def show(self, done: int, running: int, failures: int) -> None:
        text = f"{running} running, {failures} failed"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() > self._line_at:
            self._line_at = time.monotonic() + _LINE_EVERY_S
            speed = (done - self._first) / (time.monotonic() - self._begin)
            left = f", {(self._total - done) / speed:.0f} s to go" if speed else ""
            self.say(
                f"{done} of {self._total} trials done, {text}, {60 * speed:.0f} a minute{left}"
            )

    def say(self, text: str) -> None:
        _say(" ".join(text.split()))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _say(text: str) -> None:
    """Print the text above the bar."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def _last_words_of(slot: Slot) -> str:
    """Return the last output of the trial's process, to be appended to a message."""
    try:
        with slot.log.open("rb") as log:
            log.seek(slot.log_from)
            return last_words(log.read().decode(errors="replace"))
    except OSError:
        return ""


def last_words(output: str) -> str:
    """Return where a process crashed and its last lines, to be appended to a message.

    The text is empty if the process printed nothing. Of Python's crash report (faulthandler) it
    keeps the innermost frame outside of the libraries, and drops the list of extension modules.
    """
    printed, crashed, report = output.rpartition("Fatal Python error: ")
    printed = printed if crashed else output
    places = re.findall(r'File "(.+)", line (\d+) in (.+)', report) if crashed else []
    place = next(
        (place for place in places if "/lib/python" not in place[0]), places[0] if places else None
    )
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    text = " | ".join(lines[-_LAST_LINES:])[-_LAST_CHARACTERS:]
    return (f" in {place[2]} ({place[0]}, line {place[1]})" if place else "") + (
        f"; its last lines: {text}" if text else ""
    )
