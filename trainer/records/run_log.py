"""Write the output of a running training to the run's folder, the console and TensorBoard."""

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainbox.errors import StorageFailure, WrongUse
from trainbox.folders.lease import RENEW_S
from trainbox.folders.record_folder import LOGS, METRICS
from trainbox.folders.write_failures import writing
from trainer.data.schedule import Schedule
from trainer.records.console import Console
from trainer.records.gpu_events import new_events, note_run, show_events
from trainer.records.jsonl import numbers
from trainer.records.run_folder import RunFolder
from trainer.records.tensorboard import TensorBoardLog
from trainer.system.background import in_background

_EVENTS_EVERY_S = 5.0


class RunLog:
    """The record of one run. On ranks other than the first, most methods do nothing."""

    def __init__(
        self, path: Path, rank: int, hang_minutes: float | None = None, is_kept: bool = True
    ) -> None:
        """Open the run in `path`. A training without progress for `hang_minutes` is ended.

        If the folder is removed afterwards, it is not kept, and the summary names no files.

        A thread renews the lease of the folder, because a validation may take longer than a lease,
        and looks whether the training makes progress.

        Raises:
            StorageFailure: The folder cannot be written.
            WrongUse: Another process trains in it.
        """
        self.path, self.writes, self.is_kept = path, rank == 0, is_kept
        self.folder = RunFolder(path, self.writes)
        log = path / LOGS / f"rank-{rank}.log"
        try:
            with writing(log):
                self.console = Console(log, self.writes, hang_minutes)
        except StorageFailure:
            self.folder.close()
            raise
        self.report = self.console.report
        self.board = TensorBoardLog(path, self.report)
        self._is_recording, self._entries_before = False, list[dict[str, Any]]()
        self._step, self._steps_per_epoch, self._events_at = 0, 1, 0.0
        self._closed = threading.Event()
        self._pulse = in_background(self._look_until_closed, "pulse")

    def _look_until_closed(self) -> None:
        self.console.look()
        while not self._closed.wait(RENEW_S):
            with contextlib.suppress(WrongUse):  # the next record raises it
                self.folder.renew()
            self.console.look()

    def report_lost(self, step: int, evaluated_step: int) -> None:
        """Report the records that have lost their entries up to `step`.

        Raises:
            StorageFailure: A record cannot be read.
        """
        for name in self.folder.lost_records(step, evaluated_step) if self.writes else ():
            self.report(
                f"{self.path / name} is missing or damaged: its entries up to step {step} are "
                "lost, so verify will fail"
            )

    def begin(self, step: int, evaluated_step: int, schedule: Schedule) -> None:
        """Start to record at `step`, and drop the entries of steps that will be repeated."""
        if not self.writes:
            return
        self._entries_before = self.folder.cut_records(step, evaluated_step)
        self._is_recording = True
        note_run(self.path / METRICS)
        self.board.begin(step + 1)
        self._step, self._steps_per_epoch = step, schedule.steps_per_epoch
        # TensorBoard drops everything after `step`, so later events are written again.
        later = (entry for entry in self._entries_before if entry["step"] > step)
        self._show_events([entry for entry in later if entry["kind"] == "health"])
        self.console.start_bar(step, schedule)

    def advance(self) -> None:
        """Count a step. Every few seconds, record hardware events."""
        self._step += 1
        self.console.count_step()
        if time.monotonic() > self._events_at:
            self._events_at = time.monotonic() + _EVENTS_EVERY_S
            self._record_events()

    def record(
        self,
        kind: str,
        step: int,
        epoch: int,
        values: Mapping[str, Any],
        line: str,
        speed: str | None = None,
    ) -> None:
        """Write an entry to metrics.jsonl and TensorBoard, and `line` to the terminal.

        With `speed`, the line is shown on the bar, or every few seconds without a bar.

        Raises:
            StorageFailure: metrics.jsonl cannot be written.
        """
        if not self.writes:
            return
        now_unix_s = round(time.time(), 3)
        entry = {"kind": kind, "step": step, "epoch": epoch, "time_unix_s": now_unix_s, **values}
        self.folder.append(METRICS, entry)
        self.board.write(lambda file: file.scalars(numbers(entry), step))
        if speed is None:
            self.report(line)
        else:
            self.console.report_progress(line, speed)

    def _record_events(self) -> None:
        """Write new hardware events, which the entrypoint has already printed."""
        if not self._is_recording:
            return
        events = new_events(self._entries_before)
        epoch = (max(1, self._step) - 1) // self._steps_per_epoch + 1
        for event in events:
            entry = {"kind": "health", "step": self._step, "epoch": epoch, **event}
            self.folder.append(METRICS, entry)
        self._show_events(events)

    def _show_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.board.write(lambda file: show_events(file, events, self._step))

    def end_progress(self) -> None:
        """Close the bar and TensorBoard's files. `report` still works."""
        # A failure to record events must not hide the result or the error of the training.
        with contextlib.suppress(StorageFailure):
            self._record_events()
        self.console.end_bar()
        self.board.close()
        self._is_recording = False

    def close(self) -> None:
        """Close all files and release the folder for other processes."""
        self._closed.set()
        self._pulse.result()
        self.end_progress()
        self.console.close()
        self.folder.close()
