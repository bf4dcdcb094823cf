"""Wait for a start of a training, and stop or kill it."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from entrypoint.launch.children import STOP_BUDGET_S
from entrypoint.launch.inner_trainings import Process
from trainbox.errors import ExitCode, Failure, shell_code
from trainbox.processes.process_tree import kill_tree
from trainbox.processes.streams import show_progress

_POLL_S = 0.02
_END_S = 30.0  # the wait for the processes of a killed start
_SLACK_S = 30.0  # for the records of a start whose script was killed after the budget
# Exit codes of a start that got SIGTERM: the script has saved, or has no handler.
STOPPED = (ExitCode.PREEMPTED, 128 + signal.SIGTERM, -signal.SIGTERM)
_CLOSING_TABLE = f"{'run':<10} "  # the begin of that table


def wait(condition: Callable[[], bool], process: Process, progress: Callable[[], str]) -> None:
    """Poll until `condition` is true or the process has ended, and show the progress meanwhile."""
    shown = ""
    try:
        while process.poll() is None:
            begin_s = time.monotonic()
            if condition():
                return
            if (text := progress()) != shown:
                show_progress(text)
                shown = text
            # A look through many files takes long. Wait 4 times as long, so that the training has
            # the CPU for most of the time.
            time.sleep(max(_POLL_S, 4 * (time.monotonic() - begin_s)))
    finally:
        show_progress()


def failure_of(returncode: int, log: Path) -> Failure:
    """Return the error for a start that failed, with its exit code and the last line of its log.

    The table that `trainbox run` prints at the end is left out.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    tables = [number for number, line in enumerate(lines) if line.startswith(_CLOSING_TABLE)]
    shown = [line for line in lines[: tables[-1] if tables else None] if line.strip()]
    return Failure((shown or ["no output"])[-1], exit_code=shell_code(returncode))


def stop(process: Process) -> bool:
    """Send SIGTERM to a start, and wait for its end. Return whether the script has ignored it.

    `trainbox run` kills a script that ignores SIGTERM at the end of the budget.
    """
    begin_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_BUDGET_S + _SLACK_S)
    ended = process.returncode in (ExitCode.SUCCESS, *STOPPED)
    return not ended and time.monotonic() - begin_s >= STOP_BUDGET_S


def kill(process: Process) -> None:
    """Kill a start and all processes that it started, as the end of a job does.

    `trainbox run` adopts orphans, so its tree also has processes whose parents have ended.
    """
    kill_tree(process.pid, _END_S)
    process.wait()
