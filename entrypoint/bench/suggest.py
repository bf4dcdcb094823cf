"""The suggestions of `trainbox bench --suggest`. Pure.

They recommend a batch size, workers and GPUs, and list the cases to measure next. A larger value
pays if it is faster by the factor PAYS.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from entrypoint.bench.tables import (
    PAYS,
    BenchCase,
    BenchResult,
    Measured,
    describe,
    ratio,
    waiting_share,
)

_POOR_EFFICIENCY = 0.5
_FLAGS = {"batch_size": "--batch-size", "workers": "--workers"}


@dataclass(frozen=True)
class _Group:
    """The cases of one count and strategy, and their best case."""

    cases: Mapping[BenchCase, BenchResult]
    best: BenchCase

    @property
    def measured(self) -> Measured:
        """The figures of one round of the best case."""
        return next(iter(self.cases[self.best].rounds.values()))

    @property
    def data_share(self) -> float:
        """The fraction of the time in which the best case waits for data."""
        return waiting_share(self.cases[self.best].rounds.values(), "data_seconds") or 0.0


def further(outcomes: Mapping[BenchCase, BenchResult], rounds: int, cpus: int) -> list[BenchCase]:
    """Return the cases to measure in the next `rounds` rounds, or none if nothing is left to try.

    For each count and strategy, these are the best case, twice its batch and twice its workers.
    """
    groups = [group for group in _groups(outcomes, rounds).values() if group is not None]
    tries = [
        case
        for group in groups
        for case in (_more_batch(group)[0], _more_workers(group, cpus)[0])
        if case is not None
    ]
    return [*(group.best for group in groups), *tries] if tries else []


def suggestions(
    outcomes: Mapping[BenchCase, BenchResult], unit: str, rounds: int, cpus: int
) -> list[str]:
    """Return the lines of advice.

    For each count and strategy, a line has the largest batch and the most workers that pay, and
    why. Further lines say whether more GPUs or processes pay.
    """
    groups = _groups(outcomes, rounds)
    found = []
    for kind, group in groups.items():
        if group is None:
            found.append(f"{describe(kind, unit)}: no case has a result")
            continue
        reasons = _more_or_less(group, "batch_size", _more_batch(group)[1])
        waits = f"it waits for data {group.data_share:.0%} of the time"
        reasons += [*_more_or_less(group, "workers", ""), waits + _more_workers(group, cpus)[1]]
        found.append("; ".join([f"{describe(kind, unit)}: {_options(group.best)}", *reasons]))
    bests = [group.best for group in groups.values() if group is not None]
    return found + _count_advice(bests, outcomes, unit)


def pays(outcome: BenchResult, against: BenchResult) -> bool:
    """Return whether `outcome` is faster in every round, and by the factor PAYS in the median."""
    found = ratio(outcome, against)
    return found is not None and found.median >= PAYS and found.least > 1


def _groups(
    outcomes: Mapping[BenchCase, BenchResult], rounds: int
) -> dict[BenchCase, _Group | None]:
    """Return the groups by count and strategy, as a case without batch and workers.

    A group without any result is None.
    """
    by_kind: dict[BenchCase, dict[BenchCase, BenchResult]] = {}
    for case, outcome in outcomes.items():
        if outcome.rounds or outcome.failure:
            kind = dataclasses.replace(case, batch_size=None, workers=None)
            by_kind.setdefault(kind, {})[case] = outcome
    bests = {kind: _best(own, rounds) for kind, own in by_kind.items()}
    return {
        kind: None if best is None else _Group(by_kind[kind], best) for kind, best in bests.items()
    }


def _best(own: Mapping[BenchCase, BenchResult], rounds: int) -> BenchCase | None:
    """Return the best case.

    Start with the best of the first `rounds` rounds. In each following block of rounds, the best
    was measured together with new cases, and the best of these becomes the new best.
    """
    best: BenchCase | None = None
    last = max((number for outcome in own.values() for number in outcome.rounds), default=-1)
    for first in range(0, last + 1, rounds):
        numbers = set(range(first, first + rounds))
        there = {
            case: one
            for case, one in own.items()
            if numbers & one.rounds.keys() and (not one.failure or numbers <= one.rounds.keys())
        }
        if there and (best is None or best in there or own[best].failure):
            best = _best_of(there)
    if best is not None and own[best].failure:  # the best failed in the last rounds
        good = {case: one for case, one in own.items() if one.rounds and not one.failure}
        return _best_of(good) if good else None
    return best


def _best_of(there: Mapping[BenchCase, BenchResult]) -> BenchCase:
    """Return the largest case that pays.

    For each batch size, increase the workers while this pays. Then increase the batch size while
    this pays.
    """

    def step(best: BenchCase, more: BenchCase) -> BenchCase:
        return more if pays(there[more], there[best]) else best

    by_batch: dict[int | None, list[BenchCase]] = {}
    for case in sorted(there, key=lambda case: (case.batch_size or 0, case.workers or 0)):
        by_batch.setdefault(case.batch_size, []).append(case)
    return functools.reduce(
        step, [functools.reduce(step, same_batch) for same_batch in by_batch.values()]
    )


def _more_batch(group: _Group) -> tuple[BenchCase | None, str]:
    """Return the best case with twice the batch; or None, and why not to try it."""
    if _neighbours(group, "batch_size")[1]:
        return None, ""
    batch_size = 2 * group.measured.batch_size
    if batch_size > group.measured.examples:
        return None, f"twice its batch is more than the {group.measured.examples:,} examples"
    return dataclasses.replace(group.best, batch_size=batch_size), "a larger batch was not tried"


def _more_workers(group: _Group, cpus: int) -> tuple[BenchCase | None, str]:
    """Return the best case with twice the workers; or None, and why not to try it.

    The reason continues the sentence on how long the case waits for data.
    """
    if _neighbours(group, "workers")[1]:
        return None, ""
    now = group.measured.workers
    if group.data_share < 1 - 1 / PAYS:
        return None, ", and more workers cannot pay"
    if now == 0 and group.best.workers != 0:
        return None, ", and the data is in memory, which needs no workers"
    workers = max(1, 2 * now)
    processes = 1 if group.best.strategy == "dp" else group.best.count
    if workers * processes > cpus:
        return None, f", and twice the workers are more than the {cpus} CPUs"
    return dataclasses.replace(group.best, workers=workers), ", and more workers were not tried"


def _options(case: BenchCase) -> str:
    batch = "the task's own batch" if case.batch_size is None else f"--batch-size {case.batch_size}"
    return batch if case.workers is None else f"{batch} --workers {case.workers}"


def _neighbours(group: _Group, name: str) -> tuple[list[BenchCase], list[BenchCase]]:
    """Return the cases that differ from the best only by a smaller or a larger value of `name`.

    The nearest values are first.
    """
    best = group.best

    def amount(case: BenchCase) -> int:
        return getattr(case, name) or 0  # the search starts with the task's own value, None

    same = [
        case
        for case in sorted(group.cases, key=amount)
        if dataclasses.replace(case, **{name: getattr(best, name)}) == best
    ]
    less = [case for case in same if amount(case) < amount(best)]
    return less[::-1], [case for case in same if amount(case) > amount(best)]


def _more_or_less(group: _Group, name: str, why_no_more: str) -> list[str]:
    """Return how the next larger and the next smaller value compare with the best.

    If a larger value was not measured, `why_no_more` is the reason.
    """
    less, more = _neighbours(group, name)
    compared = [_comparison(group, case, name) for case in (*more[:1], *less[:1])]
    return [*compared, why_no_more] if why_no_more else compared


def _comparison(group: _Group, case: BenchCase, name: str) -> str:
    value = getattr(case, name)
    setting = "the task's own" if value is None else f"{_FLAGS[name]} {value}"
    if failure := group.cases[case].failure:
        return f"{setting} has no result ({failure})"
    found = ratio(group.cases[case], group.cases[group.best])
    if found is None:
        return f"{setting} was not measured in the same round"
    return (
        f"{setting} gives {found.median:.2f}x ({found.least:.2f} to {found.most:.2f}) of its "
        "samples/s"
    )


def _count_advice(
    chosen: Sequence[BenchCase], outcomes: Mapping[BenchCase, BenchResult], unit: str
) -> list[str]:
    """Return whether more GPUs pay against the fewest, each count at its best settings."""
    if len(chosen) < 2:
        return []
    base = min(chosen, key=lambda case: case.count)
    lines = []
    for case in chosen:
        found = ratio(outcomes[case], outcomes[base])
        if case.count == base.count or found is None:
            continue
        efficiency = found.median * base.count / case.count
        verdict = (
            "pays" if pays(outcomes[case], outcomes[base]) else f"does not pay: use {base.count}"
        )
        poor = ", most of it lost" if verdict == "pays" and efficiency < _POOR_EFFICIENCY else ""
        name = describe(BenchCase(case.count, case.strategy, None, None), unit)
        lines.append(
            f"{name} {verdict}: {found.median:.2f}x ({found.least:.2f} to {found.most:.2f}) of "
            f"{base.count}, each at its best settings, an efficiency of {efficiency:.0%}{poor}"
        )
    return lines
