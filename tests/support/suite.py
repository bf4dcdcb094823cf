"""Run the tests, with lint beside them: `python -P -m tests.support.suite --lint [OPTIONS]`.

pytest prints its progress. The output of lint is printed when it has ended. The exit code is the
first code that is not 0.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from tests.support.fork_server import shared

# A test often waits for the processes that it starts, so one more worker keeps the cores busy.
_FORKS = min(4, os.cpu_count() or 1) + 1
_PYTEST = [sys.executable, "-P", "-m", "pytest", "--durations=15", "--durations-min=1"]
_PYTEST += ["-p", "tests.support.forked_workers", "--forks", str(_FORKS)]


def commands(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the commands of the tests and of lint, or [] without `--lint` in the `options`.

    pytest gets the other options.
    """
    lint = ["make", "--no-print-directory", "lint"] if "--lint" in options else []
    return [*_PYTEST, *(option for option in options if option != "--lint")], lint


def run(tests: Sequence[str], lint: Sequence[str]) -> int:
    """Run both commands at the same time and return the exit code for both."""
    started: list[subprocess.Popen[bytes]] = []

    def stop(_number: int, _frame: FrameType | None) -> None:
        for process in started:
            process.terminate()

    signal.signal(signal.SIGTERM, stop)
    # A terminal sends Ctrl-C to all processes, so it is not passed on.
    signal.signal(signal.SIGINT, lambda *_: None)
    # If nothing is written, each run compiles all tests, in a third of the time of a collection.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    started.append(subprocess.Popen(tests, stdin=subprocess.DEVNULL, env=env))
    if lint:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        linting = subprocess.Popen(lint, stdin=subprocess.DEVNULL, env=env, **pipes)
        started.append(linting)
        output, _ = linting.communicate()
        title = f"\n===== lint: {shlex.join(lint)}\n".encode()
        end = f"===== lint: exit code {linting.returncode}\n".encode()
        # One write, so that the lines of the tests do not come between.
        sys.stdout.buffer.write(title + output + end)
        sys.stdout.flush()
    return exit_code([process.wait() for process in started])


def exit_code(codes: Sequence[int]) -> int:
    """Return the first code that is a failure, or 0; a process killed by a signal N is 128 + N."""
    failure = next((code for code in codes if code), 0)
    return failure if failure >= 0 else 128 - failure


if __name__ == "__main__":
    with shared() as variables:
        os.environ |= variables
        sys.exit(run(*commands(sys.argv[1:])))
