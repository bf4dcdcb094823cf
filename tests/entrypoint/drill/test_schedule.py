"""The schedules of a drill, and the moments of its kills."""

import itertools
import random

import pytest

from entrypoint.drill.schedule import kill_shares, script_schedules, task_schedules


@pytest.mark.parametrize("most", [1, 2, 3, 4, 8])
def test_the_schedules_of_a_task(most: int) -> None:
    drilled = task_schedules(most)
    assert [case.processes for case in drilled if len(case.processes) == 1] == [
        (count,) for count in range(1, most + 1)
    ]
    killed = [case.processes for case in drilled if len(case.processes) > 1]
    assert killed
    assert all(1 <= count <= most for path in killed for count in path)
    changes = {(before, after) for path in killed for before, after in itertools.pairwise(path)}
    assert most == 1 or (any(a < b for a, b in changes) and any(a > b for a, b in changes))


@pytest.mark.parametrize(
    ("counts", "kills", "expected"),
    [
        ((1,), 2, ["1", "1 -> 1 -> 1"]),
        ((2,), 1, ["2", "2 -> 2"]),
        ((1, 2), 1, ["1", "2", "1 -> 1", "1 -> 2", "2 -> 1"]),
        ((1, 2), 2, ["1", "2", "1 -> 1 -> 1", "1 -> 2 -> 1", "2 -> 1 -> 2"]),
        ((1, 2, 4), 2, ["1", "2", "4", "1 -> 1 -> 1", "1 -> 2 -> 4", "4 -> 2 -> 1"]),
    ],
)
def test_the_schedules_of_a_script(
    counts: tuple[int, ...], kills: int, expected: list[str]
) -> None:
    assert [str(case) for case in script_schedules(counts, kills)] == expected


@pytest.mark.parametrize("kills", [1, 2, 5])
def test_the_moments_of_kills(kills: int) -> None:
    """The last one is late, because the start after an early kill is as long as the training."""
    drawn = [kill_shares(kills, random.Random(seed)) for seed in range(200)]  # noqa: S311
    *early, late = zip(*drawn, strict=True)
    for number, shares in enumerate(early):
        low, high = 0.6 * number / (kills - 1), 0.6 * (number + 1) / (kills - 1)
        assert all(low <= share < high for share in shares)
    assert all(0.6 <= share <= 0.8 for share in late)
