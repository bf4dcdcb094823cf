"""The results of the checks on a GPU, as values, JSON and Markdown."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# The order of the checks of one step. The first ones need the least.
TOPICS = (
    "readers",
    "precision",
    "bits",
    "syncs",
    "checkpoints",
    "capture",
    "speed",
    "work",
    "failures",
    "memory",
    "loader",
    "watch",
    "ranks",
    "sweep",
    "compile",
)
# What one GPU cannot show.
NEEDS_MORE = {
    "DataParallel": "needs several GPUs",
    "NVLink, InfiniBand and GPUDirect": "need several GPUs or machines",
    "speed on several GPUs": "needs several GPUs",
    "differences between GPUs of one model": "need several GPUs",
    "MIG slices": "need a GPU in MIG mode, which this suite does not change",
}
_LONGEST_CELL = 400  # characters


@dataclass(frozen=True)
class Row:
    """The result of one check.

    Attributes:
        result: `passed`, `failed` or `skipped`.
        seen: values that the check has read or measured.
        reason: why the check was skipped or failed, else an empty string.
        tables: further Markdown tables, each a title and its lines.
    """

    topic: str
    check: str
    result: str
    seconds: float
    budget_s: float
    settles: str
    seen: Sequence[str] = ()
    reason: str = ""
    tables: Sequence[tuple[str, Sequence[str]]] = field(default=())


def check_name(test: str) -> str:
    """Return the name of a check from the name of its test function, with its parameters."""
    return test.removeprefix("test_").replace("_", " ")


def topic_of(file_stem: str) -> str:
    return file_stem.removeprefix("test_")


def rank(topic: str) -> int:
    """Return the position of a topic in the order of the checks."""
    return TOPICS.index(topic) if topic in TOPICS else len(TOPICS)


def as_json(machine: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the content of gpu.json."""
    return {
        "machine": dict(machine),
        "counts": counts(rows),
        "rows": [dataclasses.asdict(row) for row in rows],
        "not_checked": dict(not_checked(rows)),
    }


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Return the number of rows for each result."""
    return {
        name: sum(row.result == name for row in rows) for name in ("passed", "failed", "skipped")
    }


def not_checked(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return each claim that was not checked, and the reason."""
    skipped = [(f"{row.topic}: {row.check}", row.reason) for row in rows if row.result == "skipped"]
    return [*skipped, *NEEDS_MORE.items()]


def as_markdown(machine: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return the lines of gpu.md."""
    total = counts(rows)
    lines = ["# Checks on a GPU", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += [
        f"- checks: {total['passed']} passed, {total['failed']} failed, "
        f"{total['skipped']} skipped, {sum(row.seconds for row in rows):.0f} s",
        "",
        "| Check | Result | Time | Settles | Seen |",
        "|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in rows]
    lines += ["", "## Not checked", ""]
    lines += [f"- {claim}: {_cell(reason)}" for claim, reason in not_checked(rows)]
    for row in rows:
        for title, table in row.tables:
            lines += ["", f"## {title}", "", *table]
    return lines


def _line(row: Row) -> str:
    seen = [*([row.reason] if row.reason else []), *row.seen]
    cells = [
        f"{row.topic}: {row.check}",
        row.result,
        f"{row.seconds:.0f} of {row.budget_s:.0f} s",
        row.settles,
        "; ".join(seen),
    ]
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    """Return `text` as one cell of a table: one line, without bars, of limited length."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 4] + " ..."


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [list(map(str, head)), ["---"] * len(head), *([str(c) for c in row] for row in rows)]
    return ["| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines]


def budget_lines(budgets: Sequence[tuple[str, str, float]]) -> list[str]:
    """Return lines with the budget of each topic, for (topic, check, seconds) of each check."""
    topics = dict.fromkeys(topic for topic, _, _ in budgets)
    total = sum(seconds for _, _, seconds in budgets)
    lines = [f"time budget: {len(budgets)} checks, {total:.0f} s"]
    for topic in topics:
        lines += [
            f"  {topic}: {check}, {seconds:.0f} s"
            for other, check, seconds in budgets
            if other == topic
        ]
    return lines
