"""Run lint and the tests beside each other: `python -P -m tests.support.suite --lint [OPTIONS]`.

Two pytest processes share the tests. The first pytest process runs the CPU-bound tests and prints
their progress. The second pytest process runs the tests marked `waits`, which use little CPU. Its
output and that of lint are printed when they have ended. The exit code is the first code that is
not 0.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.support.fork_server import shared

_NO_TESTS = 5  # pytest's exit code when it selects no test
_PYTEST = [sys.executable, "-P", "-m", "pytest"]
_PYTEST += ["-p", "tests.support.forked_workers", "--durations=15", "--durations-min=1"]
_CPU_BOUND = ["--forks", str(min(4, os.cpu_count() or 1))]
# The few fast tests that wait end before the CPU-bound tests do, one after another.
_WAITING, _WAITING_FAST = ["--forks", "4"], ["--forks", "0"]
_FAST = "not slow"
_CACHE = ".pytest_cache/waits"  # of its own, so that --lf knows the failures of both


@dataclass(frozen=True)
class Part:
    """A command that runs beside the others; if `live`, it prints while it runs."""

    name: str
    command: tuple[str, ...]
    live: bool = False


def parts(words: Sequence[str]) -> list[Part]:
    """Return the commands to run for the options `words`.

    `-m` and `--junitxml` may differ between the two pytest processes and are read here. All other
    options are passed on to both.
    """
    parser = argparse.ArgumentParser(prog="suite", description=__doc__, allow_abbrev=False)
    parser.add_argument("--lint", action="store_true", help="Run `make lint` as well.")
    parser.add_argument("-m", dest="mark", metavar="EXPRESSION", help="The tests to run.")
    parser.add_argument("--junitxml", "--junit-xml", type=Path, metavar="FILE", help="The report.")
    given, others = parser.parse_known_args(words)
    found = [
        _pytest("tests", "not waits", _CPU_BOUND, given.mark, given.junitxml, others, live=True),
        _pytest(
            "tests that wait",
            "waits",
            _WAITING_FAST if given.mark == _FAST else _WAITING,
            given.mark,
            given.junitxml and given.junitxml.with_stem(f"{given.junitxml.stem}-waits"),
            [*others, "-o", f"cache_dir={_CACHE}", *_named_or_waiting(others)],
        ),
    ]
    if given.lint:
        found.append(Part("lint", ("make", "--no-print-directory", "lint")))
    return found


def _names_tests(words: Sequence[str]) -> bool:
    return any(Path(word.partition("::")[0]).exists() for word in words if word[:1] != "-")


def _named_or_waiting(words: Sequence[str]) -> list[str]:
    """Return the files with tests marked `waits`, or nothing if `words` already name tests.

    To collect all files would take seconds. pytest does not apply `--ignore` to files that are
    named, so they are left out here.
    """
    if _names_tests(words):
        return []
    ignored = [Path(word.removeprefix("--ignore=")) for word in words if "--ignore=" in word]
    return sorted(
        str(file)
        for file in Path("tests").rglob("test_*.py")
        if not any(file.is_relative_to(folder) for folder in ignored)
        and "mark.waits" in file.read_text(encoding="utf-8")
    )


def _pytest(
    name: str,
    own_mark: str,
    workers: Sequence[str],
    mark: str | None,
    report: Path | None,
    others: Sequence[str],
    live: bool = False,
) -> Part:
    marks = f"({mark}) and {own_mark}" if mark else own_mark
    reports = [f"--junitxml={report}"] if report else []
    return Part(name, (*_PYTEST, *workers, *others, "-m", marks, *reports), live)


def run(commands: Sequence[Part]) -> int:
    """Run all commands at the same time and return the exit code for all of them.

    A pytest process that selects no test is a failure only if no other one selects a test.
    """
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
    if failures := [code for code in codes if code not in (0, _NO_TESTS)]:
        return failures[0] if failures[0] > 0 else 128 - failures[0]
    return _NO_TESTS if codes.count(_NO_TESTS) > 1 else 0


def _start(part: Part) -> "subprocess.Popen[bytes]":
    kept = {} if part.live else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # If nothing is written, each worker compiles all tests, in a third of the time of a collection.
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
