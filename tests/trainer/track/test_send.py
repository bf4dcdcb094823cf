"""Each value is sent, and sent once unless a send was cut."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.trainer.track.conftest import MakeRun, sent, train_entry
from trainbox.contract.errors import NetworkFailure, StorageFailure, WrongUse
from trainer.track.runs import EntryRow, Run
from trainer.track.send import send_runs


class Recorder:
    """A tracker that records the values that it gets, and fails after `capacity` rows."""

    place = "the recorder"

    def __init__(self) -> None:
        self.values: list[tuple[str, str, int, float]] = []
        self.markers: dict[str, str] = {}
        self.closed: list[str] = []
        self.capacity = 10**6

    def open(self, run: Run, _now: str) -> "Recorded":
        return Recorded(self, run)


class Recorded:
    def __init__(self, recorder: Recorder, run: Run) -> None:
        self._recorder, self._id = recorder, run.id
        self.sent = recorder.markers.get(run.id, "")

    def send(self, rows: Sequence[EntryRow], marker: str) -> None:
        for row in rows:
            if self._recorder.capacity == 0:
                raise NetworkFailure("the recorder cannot be reached")
            self._recorder.capacity -= 1
            self._recorder.values += [(self._id, n, row.step, v) for n, v in row.values.items()]
        self.sent = self._recorder.markers[self._id] = marker

    def close(self) -> None:
        self._recorder.closed.append(self._id)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def _append(run: Path, *steps: int, loss: float = 1) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(train_entry(step, loss=loss)) + "\n" for step in steps)


def _steps(recorder: Recorder) -> list[int]:
    return [step for _, _, step, _ in recorder.values]


def _followed(
    recorder: Recorder, folders: Sequence[Path], *acts: Callable[[], object]
) -> list[str]:
    """Return what is shown if `acts` happen between two looks, the last one with a signal."""
    lines: list[str] = []
    left = list(acts)

    def wait() -> bool:
        left.pop(0)()
        return not left

    send_runs(folders, recorder, lines.append, wait)
    return lines


def test_only_new_rows_are_sent(make_run: MakeRun, recorder: Recorder) -> None:
    one = make_run("one", [train_entry(5, a=1, b=2), train_entry(5, kind="validation", c=3)])
    two, empty = make_run("two", [train_entry(7, a=1)]), make_run("empty", [])
    assert sent(recorder, one, two, empty) == ["2 runs, 3 entries"]
    assert recorder.values == [
        ("one", "train/a", 5, 1.0),
        ("one", "train/b", 5, 2.0),
        ("one", "validation/c", 5, 3.0),
        ("two", "train/a", 7, 1.0),
    ]
    assert recorder.closed == ["one", "two"]
    assert sent(recorder, one, two) == ["nothing new: the recorder has 2 runs"]
    _append(two, 9)
    assert sent(recorder, one, two) == ["1 run, 1 entry"]
    assert _steps(recorder) == [5, 5, 5, 7, 9]


@pytest.mark.parametrize("capacity", range(4))
def test_a_send_that_was_cut_loses_nothing(
    make_run: MakeRun, recorder: Recorder, capacity: int
) -> None:
    run = make_run("one", [])
    _append(run, 1, 2, 3, 4)
    recorder.capacity = capacity
    with pytest.raises(NetworkFailure):
        sent(recorder, run)
    recorder.capacity = 10
    assert sent(recorder, run) == ["1 run, 4 entries"]
    assert _steps(recorder) == [*range(1, capacity + 1), 1, 2, 3, 4]
    assert sent(recorder, run) == ["nothing new: the recorder has 1 run"]


@pytest.mark.parametrize(
    ("before", "kept", "repeated"), [(4, 4, 0), (4, 2, 2), (40, 36, 0), (40, 25, 1), (900, 5, 5)]
)
def test_rows_after_a_resume_are_sent(
    make_run: MakeRun, recorder: Recorder, before: int, kept: int, repeated: int
) -> None:
    """A resume drops the last rows and records others, perhaps more than before.

    The first rows are not sent again.
    """
    run = make_run("one", [])
    _append(run, *range(before))
    assert sent(recorder, run) == [f"1 run, {before} entries"]
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
    new = range(kept, before + 3)
    _append(run, *new, loss=9)
    del recorder.values[:]
    count = repeated + len(new)
    assert sent(recorder, run) == [f"1 run, {count} entries"]
    assert recorder.values[repeated:] == [("one", "train/loss", step, 9.0) for step in new]
    assert sent(recorder, run) == ["nothing new: the recorder has 1 run"]


def test_a_folder_that_is_not_a_run_is_skipped(
    make_run: MakeRun, recorder: Recorder, tmp_path: Path
) -> None:
    run, other = make_run("one", [train_entry(1, loss=1)]), tmp_path / "other"
    other.mkdir()
    skipped = f"skipped: {other} is not a run or a sweep"
    assert sent(recorder, other, run) == [skipped, "1 run, 1 entry"]
    with pytest.raises(WrongUse, match=r"no folder is a run .*: name one with manifest.json"):
        sent(recorder, other)


def test_follow_sends_new_entries_and_new_trials(
    make_run: MakeRun, recorder: Recorder, tmp_path: Path
) -> None:
    first = make_run("s/trial-00000", [train_entry(1, loss=1)])
    shown = _followed(
        recorder,
        [tmp_path / "s"],
        lambda: _append(first, 2, 3),
        lambda: None,
        lambda: make_run("s/trial-00001", [train_entry(7, loss=1)]),
    )
    assert shown == ["1 run, 1 entry", "1 run, 2 entries", "1 run, 1 entry"]
    assert _steps(recorder) == [1, 2, 3, 7]
    assert recorder.closed == ["s-trial-00000", "s-trial-00001"]


def test_follow_survives_the_removal_of_a_run(make_run: MakeRun, recorder: Recorder) -> None:
    one, two = (make_run(name, [train_entry(1, loss=1)]) for name in ("one", "two"))
    shown = _followed(
        recorder, [one, two], lambda: shutil.rmtree(one), lambda: None, lambda: _append(two, 2)
    )
    skipped = f"skipped: {one} is not a run or a sweep"
    assert shown == ["2 runs, 2 entries", skipped, "1 run, 1 entry"]
    assert _steps(recorder) == [1, 1, 2]


def test_another_run_in_the_same_folder_is_sent_as_another_run(
    make_run: MakeRun, recorder: Recorder
) -> None:
    """A sweep moves a trial aside that restarts on another GPU model."""
    run = make_run("one", [train_entry(1, loss=1)])

    def replace() -> None:
        run.rename(run.with_name("one.aside"))
        make_run("one", [train_entry(1, loss=5)], run_id="new")

    assert _followed(recorder, [run], replace) == ["1 run, 1 entry", "1 run, 1 entry"]
    assert recorder.values == [("one", "train/loss", 1, 1.0), ("new", "train/loss", 1, 5.0)]
    assert recorder.closed == ["one", "new"]


def test_follow_tries_again_after_a_lost_connection(make_run: MakeRun, recorder: Recorder) -> None:
    run = make_run("one", [train_entry(1, loss=1)])

    def lose() -> None:
        _append(run, 2, 3)
        recorder.capacity = 1

    def restore() -> None:
        recorder.capacity = 10

    shown = _followed(recorder, [run], lose, lambda: None, restore)
    lost = "the recorder cannot be reached; trying again"
    assert shown == ["1 run, 1 entry", lost, "1 run, 2 entries"]
    assert _steps(recorder) == [1, 2, 2, 3]


@pytest.mark.parametrize(("capacity", "acts"), [(0, []), (1, [lambda run: _append(run, 2)])])
def test_the_first_and_the_last_look_of_follow_must_reach_the_tracker(
    make_run: MakeRun, recorder: Recorder, capacity: int, acts: list[Callable[[Path], None]]
) -> None:
    run = make_run("one", [train_entry(1, loss=1)])
    recorder.capacity = capacity
    with pytest.raises(NetworkFailure):
        _followed(recorder, [run], *(partial(act, run) for act in acts))


def test_a_file_that_cannot_be_read_is_not_nothing_new(
    make_run: MakeRun, recorder: Recorder
) -> None:
    run = make_run("one", [])
    (run / "metrics.jsonl").unlink()
    assert sent(recorder, run) == ["nothing new: the recorder has 1 run"]
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(StorageFailure, match=r"cannot be read \(not a regular file\)"):
        sent(recorder, run)
