"""The values that numbers have later in a training."""

from collections.abc import Sequence

import pytest

from trainer.checks.aging import States, ages, counts, values_of
from trainer.checks.fingerprint import Part, Position

_POSITION: Position = (("attribute", "n"),)


def _trials(
    values: Sequence[float], steps: int = 4000, validations: int = 10, first_steps: int = 1
) -> list[list[int | float]]:
    """Return the values to try of a number, which had `values` at the six observed times."""
    states = States(*({"Net.x": Part(str(v), {_POSITION: v}, False)} for v in values))
    found = counts({"Net.x"}, states, first_steps, steps, validations)
    return [[count.value for count in trial] for trial in ages(found)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # A counter of steps has done 3,999 before the last one. 3,600 is a round number.
        ((0, 1, 1, 1, 2, 2), [[3999], [3599], [3600]]),
        # It counts down.
        ((9, 8, 8, 8, 7, 7), [[-3990]]),
        # Four forwards a step, and two in each validation.
        ((0, 4, 6, 6, 10, 12), [[6 + 4 * 3998 + 20], [11996], [12000]]),
        # Only validations count.
        ((0, 0, 1, 1, 1, 2), [[11], [8], [10]]),
        # A float that grows by the same amount, and a mean of losses.
        ((0.0, 0.5, 0.5, 0.5, 1.0, 1.0), [[0.5 + 0.5 * 3998]]),
        ((0.0, 0.5, 0.5, 0.5, 0.7, 0.7), []),
        # All steps are read in step 1.
        ((0, 64, 64, 64, 64, 64), [[64 + 32 * 3998], [119968], [120000]]),
        # Each validation, after 400 steps, sets it back.
        ((0, 1, 0, 0, 1, 0), [[399], [359], [360]]),
        # It never changes.
        ((3, 3, 3, 3, 3, 3), []),
    ],
)
def test_a_count_has_its_value_at_the_end_and_round_values(
    values: Sequence[float], expected: list[list[float]]
) -> None:
    assert _trials(values) == expected


def test_a_short_training_has_no_round_number_beyond_its_end() -> None:
    assert _trials((0, 1, 1, 1, 2, 2), steps=15) == [[14], [11], [12], [9], [10]]
    assert _trials((0, 1, 1, 1, 2, 2), steps=3) == [[2], [1]]
    assert _trials((0, 1, 1, 1, 2, 2), steps=1) == [[1]]


def test_only_hidden_parts_age_and_all_together() -> None:
    def state(*values: int) -> dict[str, Part]:
        return {
            f"Net.{n}": Part(str(v), {(): v}, False) for n, v in zip("abc", values, strict=True)
        }

    first, after = state(1, 1, 1), state(2, 3, 2)
    states = States(state(0, 0, 0), first, first, first, after, after)
    found = counts({"Net.a", "Net.b", "Net.absent"}, states, 1, 11, 0)
    trials = [values_of(trial) for trial in ages(found)]
    assert trials[0] == {"Net.a": {(): 10}, "Net.b": {(): 19}}


def test_a_step_may_come_after_the_validation() -> None:
    assert _trials((0, 1, 1, 2, 3, 3), first_steps=2) == [[3999], [3599], [3600]]
    assert _trials((0.0, 0.5, 0.5, 1.0, 1.5, 1.5), first_steps=2)[0] == [1.0 + 0.5 * 3997]
    assert _trials((0, 64, 64, 96, 96, 96), first_steps=2)[0] == [96 + 32 * 3997]
    assert _trials((0, 1, 0, 1, 2, 0), first_steps=2) == [[399], [359], [360]]


def test_a_whole_validation_has_more_batches_than_the_sample() -> None:
    states = States(*({"Net.x": Part(str(v), {_POSITION: v}, False)} for v in (0, 1, 3, 4, 5, 7)))
    (count,) = counts({"Net.x"}, states, 2, steps=10, validations=3, share=50.0)
    assert count.value == 4 + 7 + 3 * 100
