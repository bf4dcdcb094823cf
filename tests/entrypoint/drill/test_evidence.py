"""Which observations after a kill show a resume."""

from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals

import pytest

from entrypoint.drill.evidence import Repeated, _continued, _repeated, judge, resumption
from entrypoint.drill.training import Start, Training

_CHECKPOINT, _LOG = "run/last.pt", "run/log.csv"


@pytest.mark.parametrize(
    ("continued", "rest", "whole_s", "read", "shown"),
    [
        # The steps decide if they are known.
        (True, 1.0, 9.0, [], True),
        (False, 0.1, 9.0, [_CHECKPOINT], False),
        # A clearly shorter training has read a file, if reads can be seen.
        (None, 0.3, 9.0, [_CHECKPOINT], True),
        (None, 0.3, 9.0, None, True),
        (None, 0.3, 9.0, [], False),
        # A training that takes the whole time has read a file for something else.
        (None, 0.8, 9.0, [_CHECKPOINT], False),
        (None, 0.7, 0.6, [_CHECKPOINT], False),
        (None, 1.0, 9.0, None, False),
        # The time of a very short training shows nothing.
        (None, 0.2, 0.4, [_CHECKPOINT], False),
        (None, 0.2, 0.4, None, False),
        (None, 0.0, 0.0, None, False),
    ],
)
def test_what_shows_a_resume(
    continued: bool | None, rest: float, whole_s: float, read: list[str] | None, shown: bool
) -> None:
    found = None if read is None else frozenset(read)
    assert judge(continued, Repeated(rest, whole_s), found)[0] is shown


@pytest.mark.parametrize(
    ("before", "new", "continued"),
    [
        ([1, 2, 3], [4, 5, 6], True),
        ([1, 2, 3, 4], [4, 5, 6], True),
        ([1, 2, 3, 4], [1, 4, 5, 6], True),  # each start reports the size of its model as step 1
        ([1, 2, 3], [1, 2, 3, 4, 5, 6], False),
        ([1, 2, 3], [4, 5, 6, 7, 8, 9], False),  # counts on from a log, and trains everything again
        ([1], [1, 2, 3, 4, 5, 6], None),  # it may have saved before its first report
        ([1, 2, 3, 4, 5, 6], [], True),
        ([1, 2, 3], [], None),  # a start that reports nothing may have begun again
        ([], [1, 2, 3, 4, 5, 6], None),
        ([1, 3, 4], [2, 4, 6], None),  # reports by the clock
        ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], None),  # only the first start has prepared data
    ],
)
def test_whether_the_steps_continued(
    before: list[int], new: list[int], continued: bool | None
) -> None:
    assert _continued(before, new, new, [1, 2, 3, 4, 5, 6]) is continued


@pytest.mark.parametrize(
    ("undisturbed", "start", "share"),
    [
        ({"a": [1, 2, 3, 4, 5]}, {"a": [1, 2]}, 0.4),
        # Data that only the first start has prepared before it wrote a checkpoint.
        ({"cache": [3], "a": [3.5, 4, 5]}, {"a": [0.5, 1, 2]}, 1.0),
        # The same after it has written its arguments.
        (
            {"arguments": [0], "cache": [3], "a": [3.5, 4, 5]},
            {"arguments": [0], "a": [0.5, 1, 2]},
            1.0,
        ),
        ({"arguments": [0], "a": [3.5, 4, 4.5, 5]}, {"arguments": [0], "a": [1]}, 0.25),
        ({"a": [4]}, {"a": [1]}, 0.25),  # it writes at its end only
        ({"a": [4]}, {}, 0.25),
    ],
)
def test_the_share_that_a_start_repeated(
    undisturbed: dict[str, list[float]], start: dict[str, list[float]], share: float
) -> None:
    def of(writes_s: dict[str, list[float]]) -> Start:
        all_s = sorted(second for seconds in writes_s.values() for second in seconds) or [1.0]
        return Start(all_s[0], all_s[-1], all_s[-1], writes_s, (), None)

    assert _repeated(of(start), of(undisturbed)).share == pytest.approx(share)


@pytest.mark.parametrize(("repeats", "shown"), [(0.5, True), (1.0, False)])
def test_a_start_that_finishes_at_sigterm_is_a_whole_training(
    tmp_path: Path, repeats: float, shown: bool
) -> None:
    """It shows whether it has resumed, and the start after it has nothing left to train."""
    final, read = tmp_path / "final", frozenset([_CHECKPOINT])
    writes_s = {_CHECKPOINT: (1.0,)}
    undisturbed = Start(1.0, 11.0, 11.0, writes_s, (), frozenset())
    finished_s = 1.0 + 10.0 * repeats
    training = Training(tmp_path, lambda _count: [])
    training.starts += [
        Start(1.0, 6.0, 6.0, writes_s, (), frozenset(), SIGKILL),
        Start(1.0, finished_s, finished_s, writes_s, (), read, SIGTERM, output=final),
        Start(1.0, 1.0, 1.0, {}, (), read),
    ]
    resumed, _, notes = resumption(training, undisturbed, lambda path: path == final)
    assert (resumed, notes) == (shown, [None, "finished"])


@pytest.mark.parametrize(("saves", "shown"), [(10, False), (3, True)])
def test_steps_do_not_show_a_resume_if_everything_is_trained_again(
    tmp_path: Path, saves: int, shown: bool
) -> None:
    """A script that starts over may report only the steps that its log does not have."""

    def start(saves: int, steps: range, killed_by: Signals | None = None) -> Start:
        times_s = [1.0 + number for number in range(saves)]
        log_s = [1.0 + number / 2 for number in range(len(steps))]
        writes_s, last_s = {_CHECKPOINT: times_s, _LOG: log_s}, times_s[-1]
        read = frozenset([_LOG])
        return Start(1.0, last_s, last_s, writes_s, tuple(steps), read, killed_by)

    training = Training(tmp_path, lambda _count: [])
    training.starts += [start(7, range(1, 14), SIGKILL), start(saves, range(14, 21))]
    resumed, _, _ = resumption(training, start(10, range(1, 21)), lambda _path: False)
    assert resumed is shown
