"""Two runs' digests side by side: where they part first. No torch here."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import Differs, WrongUse


@dataclass(frozen=True)
class Parting:
    """The first step whose digests differ, the step before it that both have and agree on, and what differs there."""

    step: int
    agreed_step: int | None
    tensors: tuple[str, ...]  # in the model's order, then the optimizer's; empty if only the batches' order differs

    def in_words(self) -> str:
        since = "there is no earlier step to compare" if self.agreed_step is None else f"step {self.agreed_step} is the same"
        what = f"first tensor {self.tensors[0]}, {len(self.tensors)} in all" if self.tensors else "the order of the batches"
        return f"first difference at step {self.step} ({since}): {what}"


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a .jsonl file, without the torn last line of a crash; none if there is no file."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
    return entries


def common_steps(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> list[int]:
    """The steps that both have digests of."""
    return sorted({entry["step"] for entry in one} & {entry["step"] for entry in other})


def first_parting(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> Parting | None:
    """Where two runs' digests differ first; None if they are the same at each step that both have."""
    of_one, of_other = ({entry["step"]: entry for entry in entries} for entries in (one, other))
    agreed = None
    for step in common_steps(one, other):
        a, b = of_one[step], of_other[step]
        if (a["model"], a["optimizer"], a["order"]) != (b["model"], b["optimizer"], b["order"]):
            names = [name for name in {**a["tensors"], **b["tensors"]} if a["tensors"].get(name) != b["tensors"].get(name)]
            return Parting(step, agreed, tuple(names))
        agreed = step
    return None


def verdict(one: str, other: str, digests: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], manifests: str) -> str:
    """`SAME BITS` in a sentence; `manifests` names the manifest entries in which the two runs differ, if any.

    Raises:
        Differs: they have not the same digests, with the first step and tensor.
        WrongUse: there is no step of which both have digests.
    """
    common = common_steps(digests, others)
    entries = f"; manifest entries that differ: {manifests}" if manifests else "; no manifest entry differs"
    if not common:
        raise WrongUse(f"{one} and {other} have no step in common in digests.jsonl: nothing can be compared")
    if parting := first_parting(digests, others):
        raise Differs(f"DIFFERENT BITS: {one} against {other}: {parting.in_words()}{entries}")
    last = next(entry["model"] for entry in reversed(digests) if entry["step"] == common[-1])
    return f"SAME BITS: {one} and {other}, {len(common)} digests up to step {common[-1]}, weights {last[:16]}{entries}"
