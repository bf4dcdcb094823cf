"""Each value is sent once, whatever happens between two sends."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.trainer.track.conftest import MakeRun, train_entry
from trainbox.contract.errors import Failure, NetworkFailure, StorageFailure, WrongUse
from trainer.track.runs import EntryRow, Run
from trainer.track.upload import Upload, follow, send_once


class Recorder:
    """A tracker that records the values that it gets, and fails after `capacity` rows."""

    place = "the recorder"

    def __init__(self) -> None:
        self.values: list[tuple[str, str, int, float]] = []
        self.digests: dict[str, str] = {}
        self.asked = 0
        self.failures: dict[str, Failure] = {}
        self.capacity = 10**6

    def open(self, run: Run) -> "Recorded":
        return Recorded(self, run)


class Recorded:
    def __init__(self, recorder: Recorder, run: Run) -> None:
        self._recorder, self._id = recorder, run.id
        self.sent = recorder.digests.get(run.id)

    def stored(self) -> set[tuple[str, int]]:
        self._recorder.asked += 1
        return {(name, step) for run, name, step, _ in self._recorder.values if run == self._id}

    def send(self, rows: Sequence[EntryRow]) -> None:
        for row in rows:
            if self._recorder.capacity == 0:
                raise NetworkFailure("the recorder cannot be reached")
            self._recorder.capacity -= 1
            self._recorder.values += [(self._id, n, row.step, v) for n, v in row.values.items()]

    def close(self, sent: str) -> None:
        if self._id in self._recorder.failures:
            raise self._recorder.failures[self._id]
        self._recorder.digests[self._id] = sent


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def _append(run: Path, *steps: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(train_entry(step, loss=step / 2)) + "\n" for step in steps)


def _steps(recorder: Recorder) -> list[int]:
    return [step for _, _, step, _ in recorder.values]


def test_the_second_send_has_nothing_new(make_run: MakeRun, recorder: Recorder) -> None:
    one = make_run(
        "one", [train_entry(5, loss=0.5, rate=2), train_entry(5, kind="validation", a=1)]
    )
    two = make_run("two", [train_entry(7, loss=0.25), train_entry(8, note="no number")])
    empty = make_run("empty", [])
    assert send_once([one, two, empty], recorder) == "2 runs, 3 entries"
    assert recorder.values == [
        ("one", "train/loss", 5, 0.5),
        ("one", "train/rate", 5, 2.0),
        ("one", "validation/a", 5, 1.0),
        ("two", "train/loss", 7, 0.25),
    ]
    assert recorder.asked == 2
    nothing = "nothing new: the recorder has 3 runs"
    assert send_once([one, two, empty], recorder) == nothing
    assert (len(recorder.values), recorder.asked) == (4, 2)
    _append(two, 9)
    assert send_once([one, two], recorder) == "1 run, 1 entry"
    assert _steps(recorder) == [5, 5, 5, 7, 9]


def test_a_value_that_is_written_twice_is_sent_once(make_run: MakeRun, recorder: Recorder) -> None:
    run = make_run("one", [train_entry(5, a=1), train_entry(5, a=2, b=3), train_entry(5, b=4)])
    assert send_once([run], recorder) == "1 run, 2 entries"
    assert recorder.values == [("one", "train/a", 5, 1.0), ("one", "train/b", 5, 3.0)]


@pytest.mark.parametrize("capacity", range(4))
def test_a_send_that_was_cut_continues(
    make_run: MakeRun, recorder: Recorder, capacity: int
) -> None:
    run = make_run("one", [])
    _append(run, 1, 2, 3, 4)
    recorder.capacity = capacity
    with pytest.raises(NetworkFailure):
        send_once([run], recorder)
    assert _steps(recorder) == [1, 2, 3, 4][:capacity]
    recorder.capacity = 10
    left = 4 - capacity
    assert send_once([run], recorder) == f"1 run, {left} {'entry' if left == 1 else 'entries'}"
    assert _steps(recorder) == [1, 2, 3, 4]


def test_steps_that_are_trained_again_are_not_sent_again(
    make_run: MakeRun, recorder: Recorder
) -> None:
    """A resume replaces the file, and may record other steps than before."""
    run = make_run("one", [])
    _append(run, 1, 2, 3, 4)
    upload = Upload(run, recorder)
    assert upload.look() == 4
    path = run / "metrics.jsonl"
    kept = path.read_text().splitlines(keepends=True)[:2]
    path.with_suffix(".new").write_text("".join(kept))
    path.with_suffix(".new").replace(path)
    # It is longer than before when it is read.
    with path.open("a") as file:
        file.writelines(json.dumps(train_entry(step, loss=9)) + "\n" for step in (3, 5, 6, 7))
    assert upload.look() == 3
    upload.close()
    assert _steps(recorder) == [1, 2, 3, 4, 5, 6, 7]
    assert send_once([run], recorder) == "nothing new: the recorder has 1 run"


def test_an_incomplete_line_is_sent_when_it_is_complete(
    make_run: MakeRun, recorder: Recorder
) -> None:
    run = make_run("one", [])
    _append(run, 1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
        file.flush()
        assert send_once([run], recorder) == "1 run, 1 entry"
        file.write('ss": 1}\n')
    assert send_once([run], recorder) == "1 run, 1 entry"
    assert _steps(recorder) == [1, 2]


def test_follow_sends_new_entries_and_new_trials(
    make_run: MakeRun, recorder: Recorder, tmp_path: Path
) -> None:
    first = make_run("s/trial-00000", [train_entry(1, loss=1)])
    reports: list[str] = []
    looks = iter(
        [
            lambda: _append(first, 2, 3),
            lambda: None,
            lambda: make_run("s/trial-00001", [train_entry(7, loss=1)]),
        ]
    )

    def wait() -> bool:
        act = next(looks, None)
        if act is not None:
            act()
        return act is None

    follow([tmp_path / "s"], recorder, wait, reports.append)
    assert reports == ["1 run, 1 entry", "1 run, 2 entries", "1 run, 1 entry"]
    assert _steps(recorder) == [1, 2, 3, 7]
    assert len(recorder.digests) == 2


def test_follow_survives_the_removal_of_a_run(make_run: MakeRun, recorder: Recorder) -> None:
    one, two = (make_run(name, [train_entry(1, loss=1)]) for name in ("one", "two"))
    reports: list[str] = []
    acts = iter([lambda: shutil.rmtree(one), lambda: None, lambda: _append(two, 2)])

    def wait() -> bool:
        act = next(acts, None)
        if act is not None:
            act()
        return act is None

    follow([one, two], recorder, wait, reports.append)
    assert reports == [
        "2 runs, 2 entries",
        f"{one} is no longer a run or a sweep: its new entries are not sent",
        "1 run, 1 entry",
    ]
    assert _steps(recorder) == [1, 1, 2]


def test_the_last_look_of_follow_finds_what_was_rewritten(
    make_run: MakeRun, recorder: Recorder
) -> None:
    """A script may rewrite its file in place, and make it longer than before."""
    run = make_run("one", [train_entry(step, loss=1, note="x" * 90) for step in (1, 2)])

    def wait() -> bool:
        (run / "metrics.jsonl").write_text("")
        _append(run, *range(1, 9))
        return True

    follow([run], recorder, wait, lambda text: None)
    assert _steps(recorder) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert send_once([run], recorder) == "nothing new: the recorder has 1 run"


@pytest.mark.parametrize("look", [Upload.look, Upload.look_at_all])
def test_another_run_in_the_same_folder_is_sent_as_another_run(
    make_run: MakeRun, recorder: Recorder, look: Callable[[Upload], int]
) -> None:
    """A sweep moves a trial aside that restarts on another GPU model."""
    run = make_run("one", [train_entry(1, loss=1)])
    upload = Upload(run, recorder)
    assert upload.look() == 1
    aside = run.rename(run.with_name("one.aside"))
    make_run("one", [train_entry(1, loss=5)], run_id="new")
    assert look(upload) == 1
    assert send_once([aside], recorder) == "nothing new: the recorder has 1 run"
    upload.close()
    assert send_once([run], recorder) == "nothing new: the recorder has 1 run"
    assert recorder.asked == 2
    assert recorder.values == [("one", "train/loss", 1, 1.0), ("new", "train/loss", 1, 5.0)]


def test_follow_tries_again_after_a_lost_connection(make_run: MakeRun, recorder: Recorder) -> None:
    run = make_run("one", [train_entry(1, loss=1)])
    reports: list[str] = []
    capacities = iter([1, 0, 10])

    def wait() -> bool:
        if not reports[1:]:
            _append(run, 2, 3, 4)
        recorder.capacity = next(capacities, -1)
        return recorder.capacity < 0

    follow([run], recorder, wait, reports.append)
    assert reports == [
        "1 run, 1 entry",
        "the recorder cannot be reached; trying again",
        "1 run, 2 entries",
    ]
    assert _steps(recorder) == [1, 2, 3, 4]


def test_follow_ends_if_the_first_look_fails(make_run: MakeRun, recorder: Recorder) -> None:
    recorder.capacity = 0
    with pytest.raises(NetworkFailure):
        follow([make_run("one", [train_entry(1, loss=1)])], recorder, lambda: True, print)


@pytest.mark.parametrize(
    ("kind", "closed"), [(StorageFailure, {"two", "four"}), (NetworkFailure, set())]
)
def test_the_end_of_follow_closes_the_other_runs_after_a_failure(
    make_run: MakeRun, recorder: Recorder, kind: type[Failure], closed: set[str]
) -> None:
    names = ("one", "two", "three", "four")
    runs = [make_run(name, [train_entry(1, loss=1)]) for name in names]
    recorder.failures = {"one": kind("first"), "three": StorageFailure("second")}
    with pytest.raises(kind, match="first"):
        follow(runs, recorder, lambda: True, lambda text: None)
    assert recorder.digests.keys() == closed


def test_two_processes_do_not_send_the_same_run(make_run: MakeRun, recorder: Recorder) -> None:
    run = make_run("one", [train_entry(1, loss=1)])
    upload = Upload(run, recorder)
    assert upload.look() == 1
    # A resume replaces the files of the run, and the lock stays.
    for name in ("config.json", "manifest.json"):
        (run / "copy").write_bytes((run / name).read_bytes())
        (run / "copy").replace(run / name)
    with pytest.raises(WrongUse, match="another process tracks .*one: wait until it ends"):
        send_once([run], recorder)
    upload.close()
    assert send_once([run], recorder) == "nothing new: the recorder has 1 run"


def test_a_file_that_cannot_be_read_is_not_nothing_new(
    make_run: MakeRun, recorder: Recorder
) -> None:
    run = make_run("one", [])
    (run / "metrics.jsonl").unlink()
    assert send_once([run], recorder) == "nothing new: the recorder has 1 run"
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(
        StorageFailure, match=r"metrics.jsonl cannot be read \(not a regular file\)"
    ):
        send_once([run], recorder)
