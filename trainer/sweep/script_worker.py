"""The worker process of a sweep over a user's script. It starts `trainbox run` for each trial.

It reads orders and writes answers as `trainer.sweep.worker` does, and never imports torch.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from trainbox.contract.config import split_metric
from trainbox.contract.errors import ExitCode, signal_of
from trainbox.contract.processes import die_with_parent
from trainbox.contract.streams import open_streams, outlive_readers
from trainer.sweep.crash import exit_cause, last_output
from trainer.sweep.reports import Reports
from trainer.sweep.slots import read_end, send_or_exit
from trainer.sweep.work import run_environment
from trainer.system.signals import StopRequest

_LOOK_EVERY_S = 0.2
# The script has this long to save and exit after SIGTERM. It is less than the time that the sweep
# itself has after a signal.
_SAVE_S, _KILL_S = 40.0, 5.0
# Codes of the script that mean the same for the sweep as those of a task. Others are failures.
_SAME_CODES = (ExitCode.WRONG_USE, ExitCode.NOT_FINITE)
_PREFIX = "trainbox: "


def main(connection: Connection) -> None:
    """Run the ordered trials until the other end of the connection is closed."""
    open_streams()
    outlive_readers()
    stop = StopRequest.install()
    die_with_parent()
    send_or_exit(connection, {"unusable": None})
    while True:
        try:
            order = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        send_or_exit(connection, Attempt(connection, order, stop).answer())


class Attempt:
    """One attempt at a trial: one process of `trainbox run`."""

    def __init__(self, connection: Connection, order: Mapping[str, Any], stop: StopRequest) -> None:
        self._connection, self._order, self._stop = connection, order, stop
        self._run, self._log = Path(order["run"]), Path(order["log"])
        metric = order["metric"]
        self._metric = split_metric(metric, "--metric") if metric else None
        self._reports = Reports(self._run / "metrics.jsonl", self._metric)
        self._begin_s = time.monotonic()

    def answer(self) -> dict[str, Any]:
        """Run the script; return its metrics, or the code and message of its failure."""
        starts = self._starts()
        log_from = self._log.stat().st_size if self._log.is_file() else 0
        with tempfile.TemporaryFile() as messages:
            process = self._start(messages)
            ended_early = self._wait(process)
            messages.seek(0)
            printed = messages.read().decode(errors="replace")
        if ended_early is not None:
            return ended_early | {"seconds": time.monotonic() - self._begin_s}
        if self._starts() == starts:
            return self._not_run(process.returncode, printed)
        output = last_output(read_end(self._log, log_from))
        return self._ended(process.returncode, output)

    def _start(self, messages: IO[bytes]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self._order["command"],
            env=run_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            # This process has no threads, so `preexec_fn` is safe.
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )

    def _wait(self, process: "subprocess.Popen[bytes]") -> dict[str, Any] | None:
        """Wait for the end of the process. Return the answer if it was ended early."""
        minutes = self._order["trial_minutes"]
        while not _has_ended(process, _LOOK_EVERY_S):
            if self._stop:
                _end(process)
                message = f"stopped by {self._stop.signal_name}"
                return {"code": ExitCode.PREEMPTED, "message": message}
            if minutes is not None and time.monotonic() - self._begin_s > 60 * minutes:
                _end(process)
                output = last_output(read_end(self._log, 0))
                message = f"it took longer than --trial-minutes {minutes:g}{output}"
                return {"code": ExitCode.UNEXPECTED, "message": message}
            if self._order["pruned"] and self._is_pruned():
                _end(process)
                return {"code": 0, "pruned": True, "metrics": {}}
        return None

    def _is_pruned(self) -> bool:
        """Send the new reports to the sweep, and return whether it ends the trial."""
        for step, metrics in self._reports.read():
            send_or_exit(self._connection, {"step": step, "metrics": metrics})
            if json.loads(self._connection.recv_bytes())["prune"]:
                return True
        return False

    def _not_run(self, code: int, printed: str) -> dict[str, Any]:
        """Return the answer if `trainbox run` has failed itself: the script's end is not known."""
        if code <= 0:
            return {"code": ExitCode.UNEXPECTED, "message": exit_cause(code)}
        lines = [line for line in printed.splitlines() if line.startswith(_PREFIX)]
        message = lines[-1].removeprefix(_PREFIX) if lines else exit_cause(code)
        return {"code": code, "message": message}

    def _ended(self, code: int, output: str) -> dict[str, Any]:
        """Return the answer for a script that has exited with `code`."""
        if code == 0:
            return self._succeeded()
        number = signal_of(code)
        how = (
            f"was killed by {signal.Signals(number).name}"
            if number in list(signal.Signals)
            else f"exited with code {code}"
        )
        return {
            "code": code if code in _SAME_CODES else ExitCode.UNEXPECTED,
            "message": f"the script {how}{output}",
        }

    def _succeeded(self) -> dict[str, Any]:
        self._reports.read()
        metrics = self._reports.result()
        if metrics is None:
            assert self._metric is not None
            name, names = self._metric[1], ", ".join(self._reports.names()) or "no other number"
            example = json.dumps({"step": 100, name: 0.5})
            return {
                "code": ExitCode.WRONG_USE,
                "message": f"the script has not reported {name} (but {names}): print a line such "
                f"as {example}",
            }
        return {"code": 0, "metrics": metrics, "seconds": time.monotonic() - self._begin_s}

    def _starts(self) -> int:
        """Return the number of starts of the script that have ended, as the manifest has them."""
        try:
            return len(json.loads((self._run / "manifest.json").read_bytes())["starts"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0


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
