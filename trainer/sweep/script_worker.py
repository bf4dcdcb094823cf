"""The worker process of a sweep over a user's script. It starts `trainbox run` for each trial.

It reads orders and writes answers as `trainer.sweep.worker` does, and never imports torch.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainbox.errors import ExitCode, signal_of
from trainbox.processes.process_tree import die_with_parent, start_child
from trainbox.processes.streams import last_message, open_streams, outlive_readers
from trainer.sweep.reports import JsonLines, Output, Report, Reports, TensorBoard
from trainer.sweep.slots import ask, exit_cause, last_output, serve
from trainer.sweep.trial_work import run_environment, starts_of
from trainer.system.signals import StopRequest

_LOOK_EVERY_S = 0.2
_SLOW_LOOK_EVERY_S = 10.0  # for files of TensorBoard, which are slower to read
# The script has this long to save and exit after SIGTERM. It is less than the time that the sweep
# itself has after a signal.
_SAVE_S, _KILL_S = 40.0, 5.0
# Exit codes of the script that mean the same as a task's exit codes. Others are failures.
_SAME_CODES = (ExitCode.WRONG_USE, ExitCode.NOT_FINITE)


def main(connection: Connection) -> None:
    """Run the ordered trials until the other end of the connection is closed."""
    open_streams()
    outlive_readers()
    stop = StopRequest.install()
    die_with_parent()
    serve(connection, None, lambda order: Attempt(connection, order, stop).answer())


class Attempt:
    """One attempt at a trial: one process of `trainbox run`."""

    def __init__(self, connection: Connection, order: Mapping[str, Any], stop: StopRequest) -> None:
        self._connection, self._order, self._stop = connection, order, stop
        self._run, self._log = Path(order["run"]), Path(order["log"])
        self._log_from = self._log.stat().st_size if self._log.is_file() else 0
        self._slow_look_s = time.monotonic()
        metric, pattern = order["metric"], order["metric_regex"]
        self._reports: list[Reports] = []
        if pattern is not None:
            output = Output(self._log, self._log_from, metric[1], pattern)
            self._reports = [Reports(output, metric, last=True)]
        elif not order["has_no_metric"]:
            sources = JsonLines(self._run), TensorBoard(self._run)
            self._reports = [Reports(source, metric) for source in sources]

    def answer(self) -> dict[str, Any]:
        """Run the script; return its metrics, or the code and message of its failure."""
        starts = starts_of(self._run)
        with tempfile.TemporaryFile() as messages:
            process = start_child(
                self._order["command"],
                env=run_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=messages,
            )
            ended_early = self._wait(process)
            messages.seek(0)
            printed = messages.read().decode(errors="replace")
        if ended_early is not None:
            _end(process)
            # `trainbox run` exits with 75 only if the script has saved something new.
            return {**ended_early, "saved": process.returncode == ExitCode.PREEMPTED}
        ended = starts_of(self._run)
        if len(ended) == len(starts):
            # `trainbox run` has failed itself, so the script's end is not known.
            code = process.returncode
            message = (code > 0 and last_message(printed)) or exit_cause(code)
            return {"code": code if code > 0 else ExitCode.UNEXPECTED, "message": message}
        return self._succeeded() if process.returncode == 0 else self._failed(ended[-1])

    def _wait(self, process: "subprocess.Popen[bytes]") -> dict[str, Any] | None:
        """Wait for the end of the process. Return the answer if it must be ended early."""
        while not _has_ended(process, _LOOK_EVERY_S):
            if self._stop:
                message = f"stopped by {self._stop.signal_name}"
                return {"code": ExitCode.PREEMPTED, "message": message}
            if self._order["pruned"] and self._is_pruned():
                return {"code": 0, "pruned": True, "metrics": {}}
        return None

    def _is_pruned(self) -> bool:
        """Return whether the sweep ends the trial because of its new reports."""
        sources = self._reports[:1]
        if time.monotonic() >= self._slow_look_s:
            self._slow_look_s, sources = time.monotonic() + _SLOW_LOOK_EVERY_S, self._reports
        for reports in sources:
            if self._sent(reports.read()):
                return True
            if reports.is_found:
                break
        return False

    def _sent(self, found: list[Report]) -> bool:
        """Send reports to the sweep, and return whether it ends the trial."""
        replies = [ask(self._connection, {"step": s, "metrics": m}) for s, m in found]
        return any(reply["prune"] for reply in replies)

    def _succeeded(self) -> dict[str, Any]:
        """Return the metrics of the first source that has the metric, or else of all."""
        metrics: dict[str, float] = {}
        for reports in self._reports:
            found = reports.read()
            if reports.is_found:
                if self._order["pruned"]:  # other trials are compared with all reports
                    self._sent(found)
                return {"code": 0, "metrics": reports.result()}
            metrics |= reports.newest
        return {"code": 0, "metrics": metrics}

    def _failed(self, start: Mapping[str, Any]) -> dict[str, Any]:
        code = start["exit_code"]  # `trainbox run` exits with 1 if the script exits with 75
        number = signal_of(code)
        cause = exit_cause(code if number is None else -number, "the script")
        output = last_output(self._log, self._log_from)
        answered = code if code in _SAME_CODES else ExitCode.UNEXPECTED
        return {"code": answered, "message": cause + output}


def _has_ended(process: "subprocess.Popen[bytes]", within_s: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return process.returncode is not None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Let the script save and exit. `trainbox run` kills it at the second signal."""
    for number, within_s in (
        (signal.SIGTERM, _SAVE_S),
        (signal.SIGTERM, _KILL_S),
        (signal.SIGKILL, _KILL_S),
    ):
        process.send_signal(number)
        if _has_ended(process, within_s):
            return


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
