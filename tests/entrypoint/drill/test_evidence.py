"""Which observations after a kill show a resume."""

import pytest

from entrypoint.drill.evidence import _continued, judge

_CHECKPOINT, _LOG = "run/last.pt", "run/log.csv"


@pytest.mark.parametrize(
    ("continued", "rest_s", "whole_s", "read", "shown"),
    [
        # The steps decide if they are known.
        (True, 9.0, 9.0, [], True),
        (False, 1.0, 9.0, [_CHECKPOINT], False),
        # A clearly shorter training has read a file, if reads can be seen.
        (None, 3.0, 9.0, [_CHECKPOINT], True),
        (None, 3.0, 9.0, [_LOG], True),
        (None, 3.0, 9.0, None, True),
        (None, 3.0, 9.0, [], False),
        # A training that takes the whole time has read a file for something else.
        (None, 9.0, 9.0, [_CHECKPOINT], False),
        (None, 7.0, 9.0, [_CHECKPOINT], False),
        (None, 9.0, 9.0, None, False),
        # The time of a very short training shows nothing.
        (None, 0.1, 0.4, [_CHECKPOINT, _LOG], False),
        (None, 0.1, 0.4, None, False),
        (None, 0.0, 0.0, None, False),
    ],
)
def test_what_shows_a_resume(
    continued: bool | None, rest_s: float, whole_s: float, read: list[str] | None, shown: bool
) -> None:
    found = None if read is None else frozenset(read)
    assert judge(continued, rest_s, whole_s, found)[0] is shown


def test_a_verdict_names_its_figures() -> None:
    read = frozenset([_CHECKPOINT, _LOG])
    assert judge(None, 8.96, 9.0, read) == (
        False,
        "after the last kill, the script trained for 9.0 s, and undisturbed for 9.0 s; it read "
        "run/last.pt and 1 more, written before the kill: let the script continue from its step; "
        "if it does, train longer, or report the steps",
    )


@pytest.mark.parametrize(
    ("before", "new", "continued"),
    [
        ([1, 2, 3], [3, 4, 5, 6], True),
        ([1], [2, 3, 4, 5, 6], True),
        ([1, 2, 3], [1, 2, 3, 4, 5, 6], False),
        ([1, 2, 3], [4, 5, 6, 7, 8, 9], False),  # counts on from a log, and trains everything again
        ([1], [1, 2, 3, 4, 5, 6], None),  # it may have saved before its first report
        ([1, 2, 3, 4, 5, 6], [], True),
        ([], [1, 2, 3, 4, 5, 6], None),
    ],
)
def test_whether_the_steps_continued(
    before: list[int], new: list[int], continued: bool | None
) -> None:
    assert _continued(before, new, new, 6) is continued
