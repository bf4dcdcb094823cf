"""Run the tests, with lint beside them: `python -P -m tests.support.suite --lint [OPTIONS]`.

pytest prints its progress. The output of lint is printed when it has ended. The exit code is the
first code that is not 0.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from tests.support.fork_server import shared

# A test often waits for the processes that it starts, so one more worker keeps the cores busy.
_FORKS = min(4, os.cpu_count() or 1) + 1
_PYTEST = [sys.executable, "-P", "-m", "pytest", "--durations=15", "--durations-min=1"]
_PYTEST += ["-p", "tests.support.forked_workers", "--forks", str(_FORKS)]


@dataclass(frozen=True)
class Part:
    """A command that runs beside the others; if `live`, it prints while it runs."""

    name: str
    command: tuple[str, ...]
    live: bool = False


def parts(options: Sequence[str]) -> list[Part]:
    """Return the commands to run for the `options`; pytest gets all but `--lint`."""
    of_pytest = (option for option in options if option != "--lint")
    found = [Part("tests", (*_PYTEST, *of_pytest), live=True)]
    if "--lint" in options:
        found.append(Part("lint", ("make", "--no-print-directory", "lint")))
    return found


def run(commands: Sequence[Part]) -> int:
    """Run all commands at the same time and return the exit code for all of them."""
    codes: dict[str, int] = {}
    with _all_ended() as started:
        waiting = []
        for part in commands:
            started.append(process := _start(part))
            ending = threading.Thread(target=_end, args=(part, process, codes))
            ending.start()
            waiting.append(ending)
        for ending in waiting:
            ending.join()
    return exit_code([codes[part.name] for part in commands])


def exit_code(codes: Sequence[int]) -> int:
    """Return the first code that is a failure, or 0; a process killed by a signal N is 128 + N."""
    failure = next((code for code in codes if code), 0)
    return failure if failure >= 0 else 128 - failure


def _start(part: Part) -> "subprocess.Popen[bytes]":
    kept = {} if part.live else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # If nothing is written, each run compiles all tests, in a third of the time of a collection.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.Popen(part.command, stdin=subprocess.DEVNULL, env=env, **kept)


def _end(part: Part, process: "subprocess.Popen[bytes]", codes: dict[str, int]) -> None:
    output, _ = process.communicate()
    codes[part.name] = process.returncode
    if not part.live:
        title = f"\n===== {part.name}: {shlex.join(part.command)}\n"
        end = f"===== {part.name}: exit code {process.returncode}\n"
        # One write, so that the lines of another process do not come between.
        _write_all((title + output.decode(errors="replace") + end).encode())


def _write_all(text: bytes) -> None:
    while text:
        text = text[os.write(1, text) :]


@contextlib.contextmanager
def _all_ended() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """End the started processes when this process gets a SIGTERM.

    A terminal sends Ctrl-C to all processes, so SIGINT is not passed on.
    """
    started: list[subprocess.Popen[bytes]] = []

    def stop(_number: int, _frame: FrameType | None) -> None:
        for process in started:
            process.terminate()

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    with shared() as variables:
        os.environ |= variables
        sys.exit(run(parts(sys.argv[1:])))
