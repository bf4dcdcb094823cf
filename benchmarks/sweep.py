"""Measure a trial of a sweep in a pool of workers, and in a separate process for each trial."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

_SLOTS = 2
_POOLED, _ALONE = 2000, 20
_ARGUMENTS = (
    "teacher_student",
    "--device",
    "cpu",
    "--set",
    "size=4",
    "--set",
    "examples=16",
    "--batch-size",
    "16",
)
_SHORT = (*_ARGUMENTS, "--epochs", "10", "--eval-every", "10", "--threads", "1")


def measure() -> Iterator[str]:
    yield f"Trials of 10 steps and one validation, {_SLOTS} at a time:"
    yield ""
    yield "| | trials | s | trials per minute | s per trial and slot |"
    yield "|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        for turn in range(_ALONE // _SLOTS):
            both = [
                _start(folder, "-m", "trainer", "train", *_SHORT, "--run", f"{turn}-{slot}")
                for slot in range(_SLOTS)
            ]
            for process in both:
                assert process.wait() == 0
        yield _row("a process per trial", _ALONE, time.perf_counter() - begin)
        begin = time.perf_counter()
        arguments = [
            "sweep",
            *_SHORT,
            "--seeds",
            str(_POOLED),
            "--processes",
            str(_SLOTS),
            "--name",
            "s",
        ]
        assert _start(folder, "-m", "entrypoint", *arguments).wait() == 0
        yield _row(
            "`trainbox sweep`, including its start and its figure",
            _POOLED,
            time.perf_counter() - begin,
        )


def _start(folder: str, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)


def _row(name: str, trials: int, seconds: float) -> str:
    return (
        f"| {name} | {trials:,} | {seconds:.1f} | {60 * trials / seconds:,.0f} | "
        f"{_SLOTS * seconds / trials:.3f} |"
    )
