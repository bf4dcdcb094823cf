"""Measure the start-up of commands, and the time to the first optimizer step.

The imports that each command needs are measured for comparison.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

REPEATS = 9

_FLOOR = "import click, pynvml"
_FIRST_OPTIMIZER = "import torch; torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), fused=True)"
_TRAIN = [
    "train",
    "digits",
    "--device",
    "cpu",
    "--max-steps",
    "1",
    "--log-steps",
    "1",
    "--run",
    "r",
]


def measure() -> Iterator[str]:
    cases: dict[str, Callable[[], float]] = {
        "python, click and pynvml alone": lambda: _seconds("-c", _FLOOR),
        "trainbox plan": lambda: _seconds("-m", "entrypoint", "plan"),
        "trainbox --help": lambda: _seconds("-m", "entrypoint", "--help"),
        "trainbox train --help": lambda: _seconds("-m", "entrypoint", "train", "--help"),
        "python -m trainer --help": lambda: _seconds("-m", "trainer", "--help"),
        "import torch and a first optimizer": lambda: _seconds("-c", _FIRST_OPTIMIZER),
        "trainbox train, to the first step": _first_step,
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(REPEATS):
        for name, case in cases.items():
            times[name].append(case())
    yield "| command | median s | least s |"
    yield "|---|---|---|"
    for name, seconds in times.items():
        yield f"| {name} | {statistics.median(seconds):.3f} | {min(seconds):.3f} |"


def _seconds(*arguments: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-P", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def _first_step() -> float:
    """Return the seconds from the command to the log entry of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        subprocess.run(
            [sys.executable, "-P", "-m", "entrypoint", *_TRAIN, "--runs-dir", folder],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        entries = map(json.loads, (Path(folder) / "r" / "metrics.jsonl").read_text().splitlines())
        return (
            float(next(entry["time_unix_s"] for entry in entries if entry["kind"] == "train"))
            - begin
        )
