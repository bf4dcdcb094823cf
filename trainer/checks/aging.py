"""Find the numbers of a task that count its steps, and their values later in the training."""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

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
    """A count, whose `value` is that of the last step of the training."""

    before_step_2: int | float
    per_step: int | float


def counts(
    hidden: Set[str],
    before_step_2: State,
    start: State,
    after_step_1: State,
    after_step_2: State,
    end: State,
    steps: int,
    validations: int,
) -> list[_Observed]:
    """Return the numbers in the parts `hidden` that count, with their values at the last step.

    The states are those of a job that validated after steps 1 and 2. Its training has `steps` steps
    and `validations`. An int counts. A float counts if both steps changed it by the same amount;
    another float, such as a mean of losses, has no value that could be predicted.
    """
    found = []
    for part in sorted(hidden & before_step_2.keys()):
        for position, before in before_step_2[part].numbers.items():
            at_start, after_1, after_2, at_end = (
                state[part].numbers.get(position, math.nan) if part in state else math.nan
                for state in (start, after_step_1, after_step_2, end)
            )
            per_validation = at_end - after_2
            # A dataset is read ahead, so the count of its examples stays the same in step 2.
            per_step = after_2 - before or (after_2 - at_start) / 2
            earlier = (after_1 - at_start, before - after_1)
            if isinstance(before, int):
                counted, per_step = True, int(per_step) if math.isfinite(per_step) else 0
            else:
                counted = math.isclose(per_step, earlier[0])
                counted &= math.isclose(per_validation, earlier[1])
            # Step 2 is the last one of the training if all earlier ones are done.
            last = before + per_step * max(0, steps - 2) + per_validation * validations
            if counted and math.isfinite(last) and (per_step or per_validation):
                found.append(_Observed(part, position, last, before, per_step))
    return found


def ages(found: Sequence[_Observed]) -> Iterator[list[Count]]:
    """Yield the counts with values to try in step 2: of the last step, and round numbers."""
    tried: list[list[Count]] = []
    for row in ((), *_ROUND):
        for reaches in (True, False):  # step 2 reaches the round number, or begins with it
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
    return reached - before if reached > count.before_step_2 else value
