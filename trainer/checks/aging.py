"""Find the numbers of a task that count its steps, and their values later in the training."""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from trainer.checks.fingerprint import ATTRIBUTE, Part, Position

# Code often acts every 10, 100 or 1,000 steps: `if self.calls % 100 == 0`. For each row, a count is
# tried with its largest value that is a multiple of the row's first number within its reach. 12,000
# is a multiple of most such intervals, so few trials are enough.
_ROUND = (12000, 6000, 1200, 600, 120, 60, 12, 4, 2), (10, 5)
_NEEDS_ONE = 60  # from this count on, the first row's number is also a multiple of 10

Numbers = dict[str, dict[Position, int | float]]  # by the attribute's name and the position in it
State = Mapping[str, Part]  # the fingerprint of each attribute


@dataclass(frozen=True)
class Count:
    """A number in the attribute `part` that steps or validations change.

    `value` is a value that it has later in the training.
    """

    part: str
    position: Position
    value: int | float

    @property
    def name(self) -> str:
        steps = (f".{key}" if kind == ATTRIBUTE else f"[{key!r}]" for kind, key in self.position)
        return self.part + "".join(steps)


@dataclass(frozen=True)
class _Observed(Count):
    """A count with its `value` before the training's last step.

    Before the rehearsed step it was `before`, and each step adds `per_step`.
    """

    before: int | float
    per_step: int | float


class States(NamedTuple):
    """The hidden state of a job at six times.

    At its start, after step 1, after a validation, before and after the step that is compared, and
    after another validation.
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
    """Return the counts in the attributes `hidden`, with their values before the last step.

    An int that changes is a count. A float is a count only if all steps changed it by the same
    amount: the later value of another float, such as a mean of losses, cannot be predicted.

    Args:
        hidden: the names of the attributes.
        states: the hidden state of the job.
        first_steps: the number of steps that the job trained up to `states.before`.
        steps: the number of steps of the whole training.
        validations: the number of validations of the whole training.
        share: the batches of a validation of the training, divided by the batches of the job's.
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
    """Yield trials: the counts with values to give them before a step.

    In the first trial, the values belong to the training's last step. The others are round numbers.
    """
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
    """Return the values of counts by the attribute's name and the position in it."""
    numbers: Numbers = {}
    for count in trial:
        numbers.setdefault(count.part, {})[count.position] = count.value
    return numbers


def _round(count: _Observed, row: Sequence[int], before: int | float) -> int | float:
    """Return the largest round number that the count reaches, minus `before`.

    It is a multiple of the first number in `row` that is not above the count's last value. If there
    is none, or the count has already passed it, return the last value.
    """
    value = count.value
    most = next((number for number in row if number <= value), None)
    if most is None or isinstance(value, float) or (row is _ROUND[1] and value >= _NEEDS_ONE):
        return value
    reached = value // most * most
    return reached - before if reached > count.before else value
