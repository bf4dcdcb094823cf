"""A slot of a sweep and its worker process (worker.py), with which it exchanges JSON objects."""

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from trainbox.errors import signal_name
from trainbox.files.regular_files import open_from
from trainbox.processes.environment import launch_facts, own_environment
from trainbox.processes.process_tree import kill_tree
from trainbox.processes.programs import SWEEP_WORKER, Program, command_of
from trainbox.processes.streams import printable
from trainer.sweep.grid import Trial

_END_BYTES = 2**16  # of a log, for the last lines or the crash report of a process
_LAST_LINES, _LAST_CHARACTERS = 3, 300
_EXIT_S = 5.0  # for a worker that has closed its connection to exit by itself


@dataclass
class Slot:
    """A GPU, a part of a GPU, or some CPU threads, for one trial at a time.

    `visible` is its CUDA_VISIBLE_DEVICES.
    """

    name: str
    visible: str
    process: "subprocess.Popen[bytes] | None" = None
    connection: Connection | None = None
    ready: bool = False
    trial: Trial | None = None
    since_s: float = 0.0  # the start of the trial, or of a worker that is not ready yet
    is_late: bool = False  # whether the trial was asked to end, because it takes too long
    failed_starts: int = 0
    worker: Program = SWEEP_WORKER
    log: Path = Path()
    log_from: int = 0  # where the log of this attempt starts, in bytes

    def start(self) -> None:
        """Start a worker, which answers when it is ready."""
        ours, theirs = Pipe()
        facts = replace(launch_facts(os.environ), reason=f"sweep -> {self.name}")
        self.process = start_worker(
            self.worker,
            theirs,
            {"CUDA_VISIBLE_DEVICES": self.visible, **facts.variable()},
        )
        theirs.close()
        self.connection, self.ready, self.trial, self.since_s = ours, False, None, time.monotonic()

    def restart(self) -> None:
        """Replace the worker."""
        self.kill()
        self.start()

    def kill(self) -> None:
        """Kill the worker and its children."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self.process is not None:
            kill_tree(self.process.pid)
            self.process.wait()

    def order(self, trial: Trial, order: Mapping[str, Any]) -> None:
        """Let the worker train a trial. The order names its log."""
        self.trial, self.since_s, self.is_late = trial, time.monotonic(), False
        self.log = Path(order["log"])
        self.log_from = self.log.stat().st_size if self.log.is_file() else 0
        self.send(order)

    def take_trial(self) -> Trial:
        """Return the trial of the slot, which is then free."""
        trial, self.trial = self.trial, None
        assert trial is not None
        return trial

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. The end of a worker is not an error here: see `has_ended`."""
        assert self.connection is not None
        with contextlib.suppress(OSError):
            self.connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """Wait for the worker's next answer. Return None if the worker has ended."""
        assert self.connection is not None
        try:
            answer: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return answer

    def has_ended(self) -> bool:
        """Return whether the worker has ended and all its answers have been received.

        A child of the worker may hold the connection open, so that `receive` would wait forever.
        """
        return (
            self.process is not None
            and self.process.poll() is not None
            and self.connection is not None
            and not self.connection.poll()
        )

    def end(self) -> str:
        """Wait for the end of a worker that has closed its connection, and return the cause."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_S)
        self.kill()
        return exit_cause(self.process.returncode)

    def last_output(self) -> str:
        """Return the last output of the trial's process, to be appended to a message."""
        return last_output(self.log, self.log_from)


def exit_cause(code: int, process: str = "its process") -> str:
    """Return how the process with this exit code ended; a negative code is a signal."""
    if code >= 0:
        return f"{process} exited with code {code}"
    return f"{process} was killed by {signal_name(-code)}"


def last_output(log: Path, begin: int) -> str:
    """Return where a process crashed and its last lines in a log, to be appended to a message.

    The text is empty if the process printed nothing after byte `begin`. Of Python's crash report
    (faulthandler) it keeps the innermost frame outside of the libraries, and drops the list of
    extension modules.
    """
    output = ""
    with contextlib.suppress(OSError), open_from(log, begin, _END_BYTES) as file:
        output = file.read().decode(errors="replace")
    printed, crashed, report = output.rpartition("Fatal Python error: ")
    printed = printed if crashed else output
    report = report.rpartition("Current thread ")[2].partition("\n\n")[0]  # without other threads
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', report) if crashed else []
    own = [frame for frame in frames if "/lib/python" not in frame[0]]
    where = ""
    if frames:
        file, line, function = (own or frames)[0]
        where = f" in {function} ({file}, line {line})"
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    # Binary output would change the terminal, and a database refuses a zero byte.
    text = printable(" | ".join(lines[-_LAST_LINES:])[-_LAST_CHARACTERS:])
    return where + (f"; its last lines: {text}" if text else "")


def send_or_exit(connection: Connection, answer: Mapping[str, Any]) -> None:
    """Send an answer of a worker, which exits if the sweep has ended."""
    try:
        connection.send_bytes(json.dumps(answer).encode())
    except OSError:
        os._exit(0)


def ask(connection: Connection, question: Mapping[str, Any]) -> Any:
    """Send a question of a worker, and return the reply of the sweep."""
    send_or_exit(connection, question)
    return json.loads(connection.recv_bytes())


def serve(
    connection: Connection,
    unusable: str | None,
    answer: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> NoReturn:
    """Answer the orders that a worker gets, until the sweep has ended.

    `unusable` is the reason why the worker cannot train, or None.
    """
    send_or_exit(connection, {"unusable": unusable})
    while True:
        try:
            order = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        send_or_exit(connection, answer(order))


def start_worker(
    program: Program, connection: Connection, variables: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a worker on its end of the connection, with `variables` in its environment."""
    return subprocess.Popen(
        command_of(program, str(connection.fileno())),
        env={**own_environment(os.environ), **variables},
        pass_fds=(connection.fileno(),),
        start_new_session=True,  # the worker and its children can be killed together
    )
