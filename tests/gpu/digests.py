"""Compare the digests of runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PARTS = ("model", "optimizer", "order")


def entries(run: Path) -> list[dict[str, Any]]:
    """Return the entries of digests.jsonl."""
    return [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]


def by_step(run: Path) -> dict[int, str]:
    """Return the digest of weights, optimizer and order at each recorded step."""
    return {e["step"]: " ".join(e[part][:16] for part in _PARTS) for e in entries(run)}


def last(run: Path) -> str:
    """Return the digest at the last recorded step, with its number."""
    digests = by_step(run)
    return f"step {max(digests)}: {digests[max(digests)]}"


def failed_allocations(run: Path) -> int:
    """Return the number of failed allocations that the run has recorded."""
    return max(int(entry.get("failed_allocations", 0)) for entry in entries(run))


def differing(repeats: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values are not the same in all repeats, or are missing in one."""
    names = dict.fromkeys(name for repeat in repeats for name in repeat)
    return [
        name
        for name in names
        if any(name not in repeat or repeat[name] != repeats[0].get(name) for repeat in repeats)
    ]


def outcome(values: Mapping[str, Any], expected: str) -> str:
    """Return the outcome of a computation with little memory, in capitals if it must not happen."""
    if "raised" in values:
        return f"{'recognized' if values['recognized'] else 'NOT RECOGNIZED'}: {values['raised']}"
    if values["digest"] == expected:
        return f"same bits, {values['failed']} failed allocations"
    if values["failed"]:
        return f"other bits, {values['failed']} failed allocations"
    return "OTHER BITS WITHOUT A SIGN"
