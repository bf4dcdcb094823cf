"""What `trainbox bench --suggest` says: which batch, how many workers and GPUs pay, and which to
try next. Pure.
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
    data_share,
    describe,
    ratio,
)

_POOR_EFFICIENCY = 0.5
_FLAGS = {"batch_size": "--batch-size", "workers": "--workers"}


@dataclass(frozen=True)
class _Group:
    """The cases of one count and strategy, and the best of them."""

    cases: Mapping[BenchCase, BenchResult]
    best: BenchCase

    @property
    def measured(self) -> Measured:
        """One round of the best."""
        return next(iter(self.cases[self.best].rounds.values()))


def further(outcomes: Mapping[BenchCase, BenchResult], rounds: int, cpus: int) -> list[BenchCase]:
    """What to measure next, in `rounds` of their own: twice the batch and the workers of what is
    best, and all that is best.
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
    """For each count and strategy the largest batch and the most workers that pay; whether the
    count does; why.
    """
    groups = _groups(outcomes, rounds)
    found = []
    for place, group in groups.items():
        if group is None:
            found.append(f"{describe(place, unit)}: no case has a result")
            continue
        reasons = _more_or_less(group, "batch_size", _more_batch(group)[1])
        waits = f"it waits for data {data_share(group.cases[group.best]):.0%} of the time"
        reasons += [*_more_or_less(group, "workers", ""), waits + _more_workers(group, cpus)[1]]
        found.append("; ".join([f"{describe(place, unit)}: {_options(group.best)}", *reasons]))
    return [
        *found,
        *_count_advice(
            [group.best for group in groups.values() if group is not None], outcomes, unit
        ),
    ]


def pays(outcome: BenchResult, against: BenchResult) -> bool:
    """Whether it is faster, in every round and by enough."""
    found = ratio(outcome, against)
    return found is not None and found.median >= PAYS and found.least > 1


def _groups(
    outcomes: Mapping[BenchCase, BenchResult], rounds: int
) -> dict[BenchCase, _Group | None]:
    """By the place, which is a case without batch and workers; None where none has a result."""
    by_place: dict[BenchCase, dict[BenchCase, BenchResult]] = {}
    for case, outcome in outcomes.items():
        if outcome.rounds or outcome.failure:
            by_place.setdefault(dataclasses.replace(case, batch_size=None, workers=None), {})[
                case
            ] = outcome
    bests = {place: _best(own, rounds) for place, own in by_place.items()}
    return {
        place: None if best is None else _Group(by_place[place], best)
        for place, best in bests.items()
    }


def _best(own: Mapping[BenchCase, BenchResult], rounds: int) -> BenchCase | None:
    """The best of the first `rounds`, then of each as many that follow, in which it was measured
    beside what was tried.
    """
    best: BenchCase | None = None
    for first in range(
        0,
        1 + max((number for outcome in own.values() for number in outcome.rounds), default=-1),
        rounds,
    ):
        numbers = set(range(first, first + rounds))
        there = {
            case: one
            for case, one in own.items()
            if numbers & one.rounds.keys() and not _failed_in(one, numbers)
        }
        if there and (best is None or best in there or own[best].failure):
            best = _best_of(there)
    if best is not None and own[best].failure:  # and nothing was measured after that
        good = {case: one for case, one in own.items() if one.rounds and not one.failure}
        return _best_of(good) if good else None
    return best


def _failed_in(outcome: BenchResult, numbers: set[int]) -> bool:
    return outcome.failure is not None and not numbers <= outcome.rounds.keys()


def _best_of(there: Mapping[BenchCase, BenchResult]) -> BenchCase:
    """Upwards through the batches, each with the workers that pay there: on to one that pays
    against the last that did.
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
    """Twice the batch of the best; or None, and why it is not to be tried."""
    if _neighbours(group, "batch_size")[1]:
        return None, ""
    batch_size = 2 * group.measured.batch_size
    if batch_size > group.measured.examples:
        return None, f"twice its batch is more than the {group.measured.examples:,} examples"
    return dataclasses.replace(group.best, batch_size=batch_size), "a larger batch was not tried"


def _more_workers(group: _Group, cpus: int) -> tuple[BenchCase | None, str]:
    """Twice the workers of the best; or None, and why they are not to be tried: it waits for data
    so much, ...
    """
    if _neighbours(group, "workers")[1]:
        return None, ""
    now = group.measured.workers
    if data_share(group.cases[group.best]) < 1 - 1 / PAYS:
        return None, ", and more workers cannot pay"
    if now == 0 and group.best.workers != 0:
        return None, ", and the data is held in memory, where no worker loads it"
    workers = max(1, 2 * now)
    processes = 1 if group.best.strategy == "dp" else group.best.count
    if workers * processes > cpus:
        return None, f", and twice the workers are more than the {cpus} CPUs"
    return dataclasses.replace(group.best, workers=workers), ", and more workers were not tried"


def _options(case: BenchCase) -> str:
    batch = "the task's own batch" if case.batch_size is None else f"--batch-size {case.batch_size}"
    return batch if case.workers is None else f"{batch} --workers {case.workers}"


def _neighbours(group: _Group, name: str) -> tuple[list[BenchCase], list[BenchCase]]:
    """The cases with less and with more of `name` than the best, and else as the best: the nearest
    first.
    """
    best = group.best

    def amount(case: BenchCase) -> int:
        return getattr(case, name) or 0  # the task's own is where the search begins

    same = [
        case
        for case in group.cases
        if dataclasses.replace(case, **{name: getattr(best, name)}) == best
    ]
    less = sorted((case for case in same if amount(case) < amount(best)), key=amount, reverse=True)
    return less, sorted((case for case in same if amount(case) > amount(best)), key=amount)


def _more_or_less(group: _Group, name: str, why_no_more: str) -> list[str]:
    """How the neighbours of the best compare, the next larger and the next smaller one; or why
    there is no larger one.
    """
    less, more = _neighbours(group, name)
    return [
        *(_comparison(group, case, name) for case in (*more[:1], *less[:1])),
        *([why_no_more] if why_no_more else []),
    ]


def _comparison(group: _Group, case: BenchCase, name: str) -> str:
    value = getattr(case, name)
    words = "the task's own" if value is None else f"{_FLAGS[name]} {value}"
    if failure := group.cases[case].failure:
        return f"{words} has no result ({failure})"
    found = ratio(group.cases[case], group.cases[group.best])
    if found is None:
        return f"{words} was not measured in the same round"
    return (
        f"{words} gives {found.median:.2f}x ({found.least:.2f} to {found.most:.2f}) of "
        "its samples/s"
    )


def _count_advice(
    chosen: Sequence[BenchCase], outcomes: Mapping[BenchCase, BenchResult], unit: str
) -> list[str]:
    """Whether more GPUs pay at their best settings, against the fewest."""
    if len(chosen) < 2:
        return []
    base = min(chosen, key=lambda case: case.count)
    told = []
    for case in chosen:
        found = ratio(outcomes[case], outcomes[base])
        if case.count == base.count or found is None:
            continue
        efficiency = found.median * base.count / case.count
        verdict = (
            "pays" if pays(outcomes[case], outcomes[base]) else f"does not pay: use {base.count}"
        )
        poor = ", most of it lost" if verdict == "pays" and efficiency < _POOR_EFFICIENCY else ""
        place = describe(BenchCase(case.count, case.strategy, None, None), unit)
        told.append(
            f"{place} {verdict}: {found.median:.2f}x ({found.least:.2f} to "
            f"{found.most:.2f}) of {base.count}, each at its own "
            f"best, an efficiency of {efficiency:.0%}{poor}"
        )
    return told
