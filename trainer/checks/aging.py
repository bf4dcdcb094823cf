"""Find the numbers of a task that count its steps, and their values later in the training."""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from trainer.checks.fingerprint import ATTRIBUTE, Part, Position

# Of each row, the largest multiple that a count reaches is tried. It is a multiple of most numbers
# after which people do something, such as 4, 10, 100 or 1,000.
_ROUND = (12000, 6000, 1200, 600, 120, 60, 12, 4, 2), (10, 5)
_NEEDS_ONE = 60  # from this count on, the multiple of the first row is also one of the second row

Numbers = dict[str, dict[Position, int | float]]  # by part and position
State = Mapping[str, Part]


@dataclass(frozen=True)
class Count:
    """A number that each step or validation changes, with a `value` that it has later."""

    part: str
    position: Position
    value: int | float

    @property
    def name(self) -> str:
        steps = (f".{key}" if kind == ATTRIBUTE else f"[{key!r}]" for kind, key in self.position)
        return self.part + "".join(steps)


@dataclass(frozen=True)
class _Observed(Count):
    """A count whose `value` belongs to the last step of the training."""

    before: int | float
    per_step: int | float


class States(NamedTuple):
    """The hidden state of a job at six times.

    The job trained a step and validated, trained up to `before`, trained one more step and
    validated again.
    """

    start: State
    after_first: State
    validated: State
    before: State
    after: State
    end: State


def counts(
    hidden: Set[str],
    states: States,
    first_steps: int,
    steps: int,
    validations: int,
    share: float = 1.0,
) -> list[_Observed]:
    """Return the numbers in the parts `hidden` that count, with their values at the last step.

    The job trained `first_steps` up to `states.before`. Its training has `steps` steps and
    `validations`, each with `share` times the batches of the job. An int counts. A
    float counts if all steps changed it by the same amount; another float, such as a mean of
    losses, has no value that could be predicted.
    """
    found = []
    for part in sorted(hidden & states.before.keys()):
        for position, before in states.before[part].numbers.items():
            start, after_first, validated, _, after, end = (
                state[part].numbers.get(position, math.nan) if part in state else math.nan
                for state in states
            )
            per_validation = end - after
            if not math.isfinite(per_validation):  # such as an element of a list that is emptied
                continue
            # A dataset is read ahead, so the count of its examples stays the same in the last step.
            per_step = after - before or (after - start) / (first_steps + 1)
            if isinstance(before, int):
                per_step = int(per_step) if math.isfinite(per_step) else 0
            elif not (
                math.isclose(per_step, after_first - start)
                and math.isclose(per_validation, validated - after_first)
            ):
                continue
            # The next step is the last one of the training if all earlier ones are done.
            last = before + per_step * max(0, steps - first_steps - 1)
            last += type(before)(per_validation * share) * validations
            if end == validated and end != after:  # each validation sets it back
                last = end + per_step * max(0, steps // max(1, validations) - 1)
            if math.isfinite(last) and (per_step or per_validation):
                found.append(_Observed(part, position, last, before, per_step))
    return found


def ages(found: Sequence[_Observed]) -> Iterator[list[Count]]:
    """Yield the counts with values to try before a step: of the last step, and round numbers."""
    tried: list[list[Count]] = []
    for row in ((), *_ROUND):
        for reaches in (True, False):  # the step ends or begins with the round number
            trial = [
                Count(each.part, each.position, _round(each, row, each.per_step * reaches))
                for each in found
            ]
            if trial and trial not in tried:
                tried.append(trial)
                yield trial


def values_of(trial: list[Count]) -> Numbers:
    """Return the values of counts by part and position."""
    numbers: Numbers = {}
    for count in trial:
        numbers.setdefault(count.part, {})[count.position] = count.value
    return numbers


def _round(count: _Observed, row: Sequence[int], before: int | float) -> int | float:
    """Return `before` less than the largest multiple of a number in `row` that the count reaches.

    Without such a multiple, return its value at the end.
    """
    value = count.value
    most = next((number for number in row if number <= value), None)
    if most is None or isinstance(value, float) or (row is _ROUND[1] and value >= _NEEDS_ONE):
        return value
    reached = value // most * most
    return reached - before if reached > count.before else value
