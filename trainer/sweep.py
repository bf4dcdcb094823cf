"""Runs a study's trials: one worker process a slot (a GPU, part of one, or CPU threads), all fed from one queue."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainer.errors import DeviceMissing, NetworkFailure, NotFinite, Preempted, StorageFailure, TrialsFailed, WrongUse
from trainer.grid import Sweep
from trainer.stopping import StopRequest
from trainer.study import Study, Trial, open_storage

_POLL_S = 0.2
_BEAT_EVERY_S = 10.0
_JOIN_S = 600.0
_LINE_EVERY_S = 10.0
_LAST_LINES, _LAST_CHARACTERS = 5, 600
_NOT_TRIED_AGAIN = (WrongUse.exit_code, NotFinite.exit_code)  # the same bits would fail in the same way


@dataclass
class Slot:
    """Where one trial at a time is trained; `visible` is its CUDA_VISIBLE_DEVICES."""

    name: str
    visible: str
    process: "subprocess.Popen[bytes] | None" = None
    connection: Connection | None = None
    ready: bool = False
    trial: Trial | None = None
    log: Path = Path()


class SweepRun:
    """This machine's part of a sweep in `folder`."""

    def __init__(
        self,
        sweep: Sweep,
        study: Study,
        folder: Path,
        data_dir: Path,
        slots: Sequence[Slot],
        retries: int,
        stop: StopRequest,
    ) -> None:
        self._sweep, self._study, self._folder, self._data_dir = sweep, study, folder, data_dir
        self._slots, self._retries, self._stop = list(slots), retries, stop
        self._again: deque[tuple[Trial, str]] = deque()  # failed trials, and the GPU that each failed on
        self._beat_at, self._failures = 0.0, 0
        self._ended_before = study.total - study.unfinished()
        self._bar = _Progress(study.total, self._ended_before)

    def run(self) -> None:
        """Train until every trial has ended, here or elsewhere.

        Raises:
            Preempted: stopped by a signal; trials under way are saved and given back.
            DeviceMissing: no slot is left to train on.
            WrongUse: the first trial to end says that the sweep cannot be.
        """
        try:
            for slot in self._slots:
                self._start(slot)
            while not self._stop and self._study.unfinished():
                self._beat()
                self._feed()
                self._listen()
            if self._stop:
                self._wind_up()
                total, left = self._study.total, self._study.unfinished()
                raise Preempted(
                    f"stopped by {self._stop.signal_name} with {total - left} of {total} trials done: the same command goes on"
                )
        finally:
            for slot in self._slots:
                self._end(slot)
            for trial, _ in self._again:
                self._study.give_back(trial)
            self._bar.close()

    def _beat(self) -> None:
        if time.monotonic() > self._beat_at:
            self._beat_at = time.monotonic() + _BEAT_EVERY_S
            self._study.beat()
            self._study.give_back_of_the_lost()

    def _feed(self) -> None:
        for slot in self._slots:
            if not slot.ready or slot.trial is not None:
                continue
            trial = self._next_for(slot)
            if trial is not None:
                self._order(slot, trial)

    def _next_for(self, slot: Slot) -> Trial | None:
        """A failed trial goes to another GPU than the one it failed on, if there is one."""
        others = {other.visible for other in self._slots} - {slot.visible}
        for index, (trial, failed_on) in enumerate(self._again):
            if failed_on != slot.visible or not others:
                del self._again[index]
                return trial
        return self._study.claim()

    def _order(self, slot: Slot, trial: Trial) -> None:
        run = self._folder / f"trial-{trial.number:05d}"
        slot.trial, slot.log = trial, run / "logs" / "rank-0.log"
        order = {
            "config": vars(self._sweep.trial_config(trial.point, trial.seed)),
            "run": str(run),
            "log": str(slot.log),
            "data_dir": str(self._data_dir),
            "pruned": self._sweep.pruner != "none",
        }
        self._tell(slot, order)

    def _tell(self, slot: Slot, order: Mapping[str, Any]) -> None:
        assert slot.connection is not None
        with contextlib.suppress(OSError):  # it has just died, which `_listen` finds out
            slot.connection.send_bytes(json.dumps(order).encode())

    def _listen(self) -> None:
        by_connection = {slot.connection: slot for slot in self._slots if slot.connection is not None}
        running = sum(slot.trial is not None for slot in self._slots)
        self._bar.show(running, self._failures)
        for connection in wait(list(by_connection), timeout=_POLL_S):
            slot = by_connection[connection]  # type: ignore[index]
            try:
                answer = json.loads(slot.connection.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                self._died(slot)
                continue
            if "unusable" in answer:
                slot.ready = answer["unusable"] is None
                if not slot.ready:
                    self._set_aside(slot, answer["unusable"])
            elif "step" in answer:
                assert slot.trial is not None
                self._tell(slot, {"prune": self._study.should_prune(slot.trial, answer["step"], answer["metrics"])})
            else:
                self._ended(slot, answer)

    def _ended(self, slot: Slot, answer: Mapping[str, Any]) -> None:
        trial, slot.trial = slot.trial, None
        assert trial is not None
        if answer["code"] == Preempted.exit_code:
            self._study.give_back(trial)
        elif answer["code"] == 0:
            record = self._study.pruned if answer.get("pruned") else self._study.done
            try:
                record(trial, answer["metrics"], answer["seconds"])
            except WrongUse:
                self._study.give_back(trial)
                raise
            self._ended_before += 1
            self._bar.advance()
        else:
            if answer["code"] not in _NOT_TRIED_AGAIN:
                self._end(slot)  # its GPU or its memory may be spoilt
                self._start(slot)
            self._failed(slot, trial, answer["message"], answer["code"])

    def _died(self, slot: Slot) -> None:
        trial, slot.trial = slot.trial, None
        self._end(slot)
        assert slot.process is not None
        code = slot.process.returncode
        how = f"killed by signal {-code}" if code < 0 else f"ended with {code}"
        if trial is None and not slot.ready:
            self._set_aside(slot, f"its process was {how} at its start")
            return
        self._start(slot)
        if trial is not None:
            self._failed(slot, trial, f"its process was {how}; {_last_lines(slot.log)}", 1)

    def _failed(self, slot: Slot, trial: Trial, message: str, code: int) -> None:
        if code == WrongUse.exit_code and not self._ended_before:  # most likely all of them would
            self._study.give_back(trial)
            raise WrongUse(f"trial {trial.number}: {message}")
        if code in _NOT_TRIED_AGAIN or trial.attempts >= self._retries:
            self._study.failed(trial, message)
            self._failures += 1
            self._bar.advance()
            self._bar.say(f"trial {trial.number} failed on {slot.name}: {message}")
            return
        self._bar.say(f"trial {trial.number} failed on {slot.name} and is tried again: {message}")
        self._again.append((self._study.attempted(trial), slot.visible))

    def _set_aside(self, slot: Slot, why: str) -> None:
        self._end(slot)
        self._slots.remove(slot)
        self._bar.say(f"{slot.name} cannot be used and is set aside: {why}")
        if not self._slots:
            raise DeviceMissing(f"no GPU is left to train on ({slot.name}: {why}): the same command goes on where there is one")

    def _start(self, slot: Slot) -> None:
        ours, theirs = Pipe()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": slot.visible, "TRAINBOX_REASON": f"sweep -> {slot.name}"}
        slot.process = subprocess.Popen(
            [sys.executable, "-m", "trainer.worker", str(theirs.fileno())], env=environment, pass_fds=(theirs.fileno(),)
        )
        theirs.close()
        slot.connection, slot.ready, slot.trial = ours, False, None

    def _end(self, slot: Slot) -> None:
        """Kill the slot's worker: what it trains is saved, or lost with it."""
        if slot.connection is not None:
            slot.connection.close()
            slot.connection = None
        if slot.process is not None:
            slot.process.kill()
            slot.process.wait()
        if slot.trial is not None:
            self._study.give_back(slot.trial)
            slot.trial = None

    def _wind_up(self) -> None:
        """Have the trials under way saved, and wait for them."""
        for slot in self._slots:
            if slot.trial is not None and slot.process is not None:
                slot.process.terminate()
        for slot in self._slots:
            while slot.trial is not None and slot.connection is not None:
                try:
                    answer = json.loads(slot.connection.recv_bytes())
                except (EOFError, OSError):
                    break
                if "step" in answer:
                    self._tell(slot, {"prune": False})
                else:
                    self._ended(slot, answer)


def run_sweep(
    sweep: Sweep,
    runs_dir: Path,
    name: str | None,
    storage: str | None,
    data_dir: Path,
    retries: int,
    joins: bool,
    stop: StopRequest,
) -> None:
    """Do this machine's part of a sweep, on the slots that the launcher has chosen (TRAINBOX_SLOTS), and show what came out.

    Raises:
        TrialsFailed: some trials ended by an error, each recorded with its last words.
        Failure: as `SweepRun.run`.
    """
    name = name or f"{sweep.config.task.rpartition(':')[2].lower()}-sweep-{sweep.fingerprint()}"
    folder = runs_dir / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if joins:
            _wait_for(storage, folder, stop)
        study = Study(open_storage(storage, folder), name, sweep)
    except OSError as error:
        raise StorageFailure(
            f"{error.filename or folder} cannot be written ({error.strerror}): choose another --runs-dir"
        ) from error
    slots = [Slot(*slot) for slot in json.loads(os.environ.get("TRAINBOX_SLOTS", '[["the CPU", ""]]'))]
    plan = os.environ.get("TRAINBOX_REASON", "1 trial at a time")
    print(f"sweep      {folder}\nplan       {plan}\ntrials     {study.total}, {study.unfinished()} to do", flush=True)
    SweepRun(sweep, study, folder, data_dir, slots, retries, stop).run()
    if joins:
        return
    from trainer.run import write_picture

    print(show(folder, storage, None, False, None), flush=True)
    (folder / "results.csv").write_text(show(folder, storage, None, True, None))
    show(folder, storage, None, False, folder / "sweep.png")
    write_picture(folder, "sweep", folder / "sweep.png")
    records = study.records()
    print(f"files      {folder}/results.csv, sweep.png; to look at all trials: tensorboard --logdir {folder}")
    if failed := [record for record in records if record.state == "failed"]:
        raise TrialsFailed(
            f"{len(failed)} of {study.total} trials failed; the first, trial {failed[0].number}: {failed[0].message}"
        )


def show(folder: Path, storage: str | None, metric: str | None, as_csv: bool, figure: Path | None) -> str:
    """What came out of the sweep in `folder`, as a table or as CSV; or drawn into the file `figure`.

    Raises:
        WrongUse: there is no sweep, or no such metric.
    """
    from trainer import results

    if storage is None and not (folder / "study.journal").is_file():
        raise WrongUse(f"{folder} holds no sweep: name one as it stands in the runs' folder, or give its --storage")
    study = Study(open_storage(storage, folder), folder.name, None)
    records = study.records()
    if as_csv:
        return results.as_csv(records)
    metric = results.metric_of(records, metric or study.sweep.metric)
    rows = results.rows(records, metric)
    if figure is None:
        return results.table(rows, metric)
    try:
        results.figure(rows, records, metric, study.sweep.sampler != "grid").savefig(figure)
    except (OSError, ValueError) as error:
        raise WrongUse(f"--figure {figure}: {error}") from error
    return f"drawn into {figure}"


def _wait_for(storage: str | None, folder: Path, stop: StopRequest) -> None:
    """Until another machine has begun the sweep."""
    deadline = time.monotonic() + _JOIN_S
    while True:
        if storage is not None or (folder / "study.journal").is_file():
            with contextlib.suppress(WrongUse):
                Study(open_storage(storage, folder), folder.name, None)
                return
        if stop or time.monotonic() > deadline:
            raise NetworkFailure(f"--worker: nobody began the sweep {folder} within {_JOIN_S:.0f} s: start it without --worker")
        time.sleep(_POLL_S)


class _Progress:
    """One bar for the whole sweep, or a line every few seconds where no terminal shows it."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._begin, self._first = total, done, time.monotonic(), done
        self._line_at = time.monotonic() + _LINE_EVERY_S
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, unit=" trials", dynamic_ncols=True)

    def advance(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update()

    def show(self, running: int, failures: int) -> None:
        text = f"{running} running, {failures} failed"
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        elif time.monotonic() > self._line_at:
            self._line_at = time.monotonic() + _LINE_EVERY_S
            speed = (self._done - self._first) / (time.monotonic() - self._begin)
            left = f", {(self._total - self._done) / speed:.0f} s to go" if speed else ""
            self.say(f"{self._done} of {self._total} trials done, {text}, {60 * speed:.0f} a minute{left}")

    def say(self, text: str) -> None:
        tqdm.write(" ".join(text.split()), file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _last_lines(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
    except OSError:
        return "it left no log"
    return "its last lines: " + " | ".join(lines)[-_LAST_CHARACTERS:]
