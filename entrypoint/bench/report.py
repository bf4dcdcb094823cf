"""The report of `trainbox bench`, in Markdown and as JSON. Pure."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from entrypoint.bench.tables import BenchCase, BenchResult, Row, describe
from trainbox.disclosure.markup import code, escaped_line

_SCALINGS = {
    "strong": "Strong scaling: fixed batch of a step",
    "weak": "Weak scaling: fixed batch of each {unit}",
    "": "Speed",
}


def markdown(table: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Return the report in Markdown: hardware and settings, tables and failures."""
    unit = str(facts["unit"])
    parts = [_preamble(table, facts)]
    for scaling, group in itertools.groupby(table, lambda row: row.line.scaling):
        own = list(group)
        title = _SCALINGS[scaling].format(unit=unit) + (
            f"; against {own[0].line.base.count}" if scaling else ""
        )
        cells = [_cells(row, unit) for row in own]
        names = [name for name in cells[0] if any(row[name] != "-" for row in cells)]
        lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in cells)]
        parts.append(f"### {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    if failed := dict.fromkeys(
        f"- {describe(row.line.case, unit)}: {code(row.failure)}" for row in table if row.failure
    ):
        parts.append("No result:\n\n" + "\n".join(failed))
    if any(row.workers == 0 and row.line.case.workers for row in table):
        parts.append(
            "The data is in memory and is loaded without workers: `--workers` has no effect."
        )
    return "\n\n".join(parts)


def _preamble(table: Sequence[Row], facts: Mapping[str, Any]) -> str:
    on = [f"{facts['hardware']}, torch {facts['torch']}"] if "hardware" in facts else []
    settings = sorted({row.arithmetic for row in table if row.arithmetic})
    rounds = (
        f"{facts['rounds']} round{'s' if facts['rounds'] > 1 else ''} of {facts['seconds']:g} s "
        "each, medians"
    )
    return (
        f"{code(facts['command'])}: "
        + "; ".join([*map(escaped_line, [*on, *settings]), rounds])
        + "."
    )


def _cells(row: Row, unit: str) -> dict[str, str]:
    """Return the cells by column. A table leaves out columns that have no value in any row."""
    case, speed = row.line.case, row.samples_per_second
    batch = row.batch_size or case.batch_size
    plural = "GPUs" if unit == "GPU" else "processes"
    return {
        plural: str(case.count),
        "strategy": case.strategy,
        "batch": _text(batch),
        f"a {unit}": _share(batch, case.count, row.accumulation),
        "workers": _text(case.workers if row.workers is None else row.workers),
        "samples/s": "no result" if speed is None else f"{speed.median:,.0f}",
        "least to most": "-" if speed is None else f"{speed.least:,.0f} to {speed.most:,.0f}",
        "an epoch, s": _text(row.epoch_s, ".3g"),
        "waits for data": _text(row.data_share, ".1%"),
        "exchange": _text(row.exchange_share, ".1%"),
        "memory of each, MiB": " ".join(f"{memory:,.0f}" for memory in row.memory_mib) or "-",
        "speed-up": "-" if row.speed_up is None else f"{row.speed_up.median:.2f}",
        "efficiency": _text(row.efficiency, ".0%"),
    }


def _text(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def _share(batch: int | None, count: int, accumulation: int) -> str:
    if batch is None:
        return "-"
    least, rest = divmod(batch, count * accumulation)
    each = f"{least} or {least + 1}" if rest else f"{least}"
    return f"{each} x {accumulation}" if accumulation > 1 else each


def as_json(
    table: Sequence[Row],
    outcomes: Mapping[BenchCase, BenchResult],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the report for programs: the rows of the tables, and each round of each case."""
    return {
        **facts,
        "rows": [dataclasses.asdict(row) for row in table],
        "cases": [
            {
                **dataclasses.asdict(case),
                "failure": outcome.failure,
                "rounds": [
                    {"round": n, **dataclasses.asdict(one)}
                    for n, one in sorted(outcome.rounds.items())
                ],
            }
            for case, outcome in outcomes.items()
        ],
    }
