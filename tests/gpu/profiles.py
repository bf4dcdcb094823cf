"""Train with `--profile`, and compare its table with the kernels of its trace."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tests.gpu.check import Check
from tests.gpu.traces import Event, device_events

STEPS = 20
_ROW = re.compile(r"^ *[\d.]+% +[\d.]+ +(\d+)  (.*)$", re.MULTILINE)


def profiled(check: Check, task: str, fields: dict[str, Any], *words: str) -> None:
    """Profile some steps of `task`; each row of the table must be a kernel, with its calls."""
    pairs = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    run = f"profile-{task}"
    lasts = ("--max-steps", str(2 * STEPS), "--profile", str(STEPS))
    ended = check.trainbox(*check.training(run, task, *pairs, *words, *lasts))
    rows = rows_of(ended.out + ended.err)
    assert rows, ended
    check.tables.append(
        (f"`--profile {STEPS}` of {task}", [f"    {calls:>7}  {name}" for name, calls in rows])
    )
    if not check.on_gpu:
        return
    trace = json.loads((check.folder / "runs" / run / "profile.json").read_text())
    wrong = wrong_rows(rows, trace["traceEvents"])
    assert not wrong, f"rows that do not count a kernel of the trace once: {wrong}"


def rows_of(printed: str) -> list[tuple[str, int]]:
    """Return the names and the calls of the table that `--profile` has printed."""
    return [(name, int(calls)) for calls, name in _ROW.findall(printed)]


def wrong_rows(rows: Sequence[tuple[str, int]], events: Iterable[Event]) -> list[tuple[str, int]]:
    """Return the rows that are not something that ran on the GPU, with the number of its runs."""
    names = Counter(event["name"] for event in device_events(events))
    calls = [(name[:60], count) for name, count in names.items()]
    return [row for row in rows if row not in calls]
