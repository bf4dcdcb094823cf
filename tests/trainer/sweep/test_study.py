"""The study of a sweep: one process claims each trial, and each trial ends once."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import TPESampler

from tests.support.here import Here
from tests.trainer.sweep.conftest import claimed
from trainbox.errors import Stopped, WrongUse
from trainbox.options.config import Config
from trainbox.processes import identity
from trainer.sweep import samplers, trial_owner
from trainer.sweep.call import _wait_for
from trainer.sweep.grid import TRIAL_FOLDERS, Range, Record, Sweep, trial_folder
from trainer.sweep.script_template import Script
from trainer.sweep.study import Study, open_journal, open_study
from trainer.system.signals import StopRequest

_SWEEP = Sweep(Config(), {"width": [4, 8, 16]}, seeds=4)
Open = Callable[..., Study]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Return a function that opens the same study again, as another process does."""

    def open_study(sweep: Sweep | None = _SWEEP, owner: str | None = None) -> Study:
        return Study(open_journal(tmp_path), "s", sweep, owner)

    return open_study


def _states(records: list[Record]) -> list[str]:
    return [record.state for record in records]


def test_two_processes_that_share_a_study_claim_each_trial_once(opened: Open) -> None:
    both = opened(owner="one"), opened(owner="other")
    claimed = []
    while trials := [trial for view in both if (trial := view.claim())]:
        claimed += trials
    assert sorted(trial.number for trial in claimed) == list(range(12))
    assert {(trial.point["width"], trial.seed) for trial in claimed} == {
        (w, s) for w in (4, 8, 16) for s in range(4)
    }


def test_a_claim_that_was_cut_off_is_completed(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = opened(Sweep(Config(), {"width": [4, 8], "dropout": [0.1, 0.2]}))
    stored, calls = view._storage.set_trial_param, list[object]()

    def full_disk(*values: Any) -> None:
        calls.append(values)
        if len(calls) == 2:
            raise OSError
        stored(*values)

    monkeypatch.setattr(view._storage, "set_trial_param", full_disk)
    with pytest.raises(OSError):
        view.claim()
    other = opened(None, owner="other")
    now = [0.0]
    monkeypatch.setattr(trial_owner.time, "monotonic", lambda: now[0])
    assert other.give_back_of_the_lost() == 0
    now[0] = 61
    assert other.give_back_of_the_lost() == 1
    assert claimed(other).point == {"width": 4, "dropout": 0.1}


def test_a_trial_too_many_does_not_hide_a_trial_that_trains_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = opened(Sweep(Config(), seeds=1))
    now, before = one._numbered, [one._numbered()]
    monkeypatch.setattr(one, "_numbered", lambda: before.pop() if before else now())
    other = opened(None, owner="other")
    other.failed(claimed(other), "it died")
    assert one.claim() is None  # a sweep of a single trial
    other.retry_failed()
    assert claimed(other).number == 0


def test_an_ended_trial_is_recorded_with_its_metrics_or_message(opened: Open) -> None:
    view = opened()
    first, second, third = (view.claim() for _ in range(3))
    assert first and second and third
    view.done(first, {"loss": 0.5, "accuracy": 0.9}, 1.5)
    view.failed(second, "it died")
    view.pruned(third, {"loss": 0.7}, 0.5)
    records = opened(None).records()
    assert records[0] == Record(0, "done", {"width": 4}, 0, {"loss": 0.5, "accuracy": 0.9}, "", 1.5)
    assert records[1] == Record(1, "failed", {"width": 8}, 0, {}, "it died", None)
    assert _states(records) == ["done", "failed", "pruned", *["pending"] * 9]
    assert [(r.point["width"], r.seed) for r in records[3:]] == [
        (w, s) for s in (1, 2, 3) for w in (4, 8, 16)
    ]
    assert opened(None).unfinished() == 9


def test_a_trial_that_is_given_back_keeps_its_number_and_its_failures(opened: Open) -> None:
    view = opened()
    trial = claimed(view)
    assert trial.attempts == 0
    view.give_back(view.attempted(trial))
    again = claimed(opened(owner="other"))
    assert (again.number, again.point, again.seed, again.attempts) == (
        0,
        {"width": 4},
        0,
        1,
    )


def test_an_ended_process_of_this_machine_loses_its_trials_at_once(opened: Open) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", f"from {identity.__name__} import own_name; print(own_name())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    lost = opened(owner=gone).claim()
    kept = opened().claim()  # this process is alive
    assert lost and kept
    view = opened(owner="third")
    assert view.give_back_of_the_lost() == 1
    again = claimed(view)
    assert again.number == lost.number


def test_a_silent_process_of_another_machine_loses_its_trials(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(trial_owner.time, "monotonic", lambda: now[0])
    silent, living = opened(owner="abc elsewhere 1 2"), opened(owner="def elsewhere 3 4")
    assert silent.claim()
    held = claimed(living)
    view = opened()
    for second in range(0, 61, 10):
        now[0] = second
        living.beat()
        assert opened().give_back_of_the_lost() == 0  # sees both for the first time
        assert view.give_back_of_the_lost() == 0
    now[0] = 61
    living.beat()
    assert view.give_back_of_the_lost() == 1
    living.done(held, {"loss": 1.0}, 1.0)
    assert _states(view.records())[:2] == ["pending", "done"]


def test_a_process_that_lost_its_trial_cannot_record_it(opened: Open) -> None:
    slow, quick = opened(owner="slow"), opened(owner="quick")
    late = claimed(slow)
    slow._back(late.id)
    again = claimed(quick)
    assert again.number == late.number
    slow.done(late, {"loss": 9.0}, 1.0)
    slow.failed(late, "late")
    slow.give_back(late)
    quick.done(again, {"loss": 1.0}, 1.0)
    assert quick.records()[0].metrics == {"loss": 1.0}


def test_more_seeds_add_the_missing_trials(opened: Open) -> None:
    view = opened()
    for _ in range(12):
        view.done(claimed(view), {"loss": 0.0}, 0.0)
    assert view.claim() is None
    more = opened(Sweep(Config(), {"width": [4, 8, 16]}, seeds=5))
    assert [
        (t.number, t.point["width"], t.seed) for t in (more.claim() for _ in range(3)) if t
    ] == [
        (12, 4, 4),
        (13, 8, 4),
        (14, 16, 4),
    ]
    assert more.claim() is None
    assert opened().total == 15  # fewer seeds forget no trial


def test_another_sweep_under_the_same_name_is_refused_with_the_difference(opened: Open) -> None:
    opened()
    with pytest.raises(WrongUse, match=r"other settings \(epochs: None -> 3\): restore them"):
        opened(Sweep(Config(epochs=3), {"width": [4, 8, 16]}, seeds=4))


def test_the_difference_of_two_templates_hides_their_secrets(opened: Open) -> None:
    def sweep(key: str) -> Sweep:
        script = Script("train.py", False, ("--lr", "{lr}", "--api-key", key))
        return Sweep(script, {"lr": [0.1]}, seeds=1)

    opened(sweep("abc"))
    with pytest.raises(WrongUse, match=r"\(template: \[.*'\(not shown\)'\] -> \[") as refused:
        opened(sweep("xyz"))
    assert "abc" not in str(refused.value)
    assert "xyz" not in str(refused.value)


def test_another_order_of_the_grid_is_the_same_sweep_with_the_same_numbers(opened: Open) -> None:
    def sweep(*names: str) -> Sweep:
        return Sweep(Config(), {name: [2, 3] for name in names})

    first = opened(sweep("size", "rank"))
    assert [trial.point for trial in (first.claim(), first.claim()) if trial] == [
        {"size": 2, "rank": 2},
        {"size": 2, "rank": 3},
    ]
    again = opened(sweep("rank", "size"))
    assert [trial.point for trial in (again.claim(), again.claim()) if trial] == [
        {"size": 3, "rank": 2},
        {"size": 3, "rank": 3},
    ]


def test_a_failed_trial_can_be_trained_again_under_its_number(opened: Open) -> None:
    view, trained = opened(), []

    def train(*failing: int) -> None:
        trial = claimed(view)
        trained.append((trial.number, trial.point["width"], trial.seed))
        if trial.number in failing:
            view.failed(trial, "no file")
        else:
            view.done(trial, {"loss": 0.0}, 0.0)

    for _ in range(6):
        train(1, 4)
    view.retry_failed()  # in the middle: later trials keep their numbers
    for _ in range(8):
        train(4)
    assert trained == [
        (n, (4, 8, 16)[n % 3], n // 3) for n in (0, 1, 2, 3, 4, 5, 1, 4, *range(6, 12))
    ]
    assert view.claim() is None
    assert [r.state for r in opened(None).records()] == [
        "failed" if n == 4 else "done" for n in range(12)
    ]
    view.retry_failed()
    assert view.unfinished() == 1
    train()
    assert [r.state for r in opened(None).records()] == ["done"] * 12


def test_a_trial_without_a_finite_value_of_the_metric_has_failed(opened: Open) -> None:
    view = opened(Sweep(Config(), {"a": [1]}, seeds=2, metric="min:loss"))
    for value in (float("nan"), float("inf")):
        view.done(claimed(view), {"loss": value}, 1.0)
    assert [(record.state, record.message) for record in opened(None).records()] == [
        ("failed", "min:loss is nan"),
        ("failed", "min:loss is inf"),
    ]


def test_a_study_that_is_not_started_cannot_be_shown(opened: Open) -> None:
    missing = r"^sweep s does not exist: start it with `.*sweep TASK --name s`$"
    with pytest.raises(WrongUse, match=missing):
        opened(None)


def test_tpe_draws_better_settings_with_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samplers, "TPESampler", partial(TPESampler, seed=1))
    sweep = Sweep(
        Config(), {"shape": ["a", "b"]}, {"lr": Range(1e-4, 1.0, True)}, 1, "tpe", 40, "min:loss"
    )
    view = open_study(tmp_path, sweep)
    losses = []
    while trial := view.claim():
        assert isinstance(trial.point["lr"], float)
        losses.append(abs(trial.point["lr"] - 0.01) + (trial.point["shape"] == "b"))
        view.done(trial, {"loss": losses[-1]}, 0.0)
    assert len(losses) == 40
    drawn = [record.point["lr"] for record in view.records()]
    # A drawn number has three digits, as in the table and on a command line.
    assert drawn == [float(f"{lr:.3g}") for lr in drawn]
    assert sum(losses[20:]) < 0.75 * sum(losses[:20])


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_sampler_draws_each_combination_once(sampler: str, tmp_path: Path) -> None:
    ranges = {"layers": Range(1, 5)}
    view = open_study(tmp_path, Sweep(Config(), {"a": [1, 2]}, ranges, 1, sampler, 10, "min:loss"))
    drawn = []
    while trial := view.claim():
        drawn.append((trial.point["a"], trial.point["layers"]))
        view.done(trial, {"loss": 1.0 * trial.number}, 0.0)
    assert sorted(drawn) == [(a, layers) for a in (1, 2) for layers in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("drawn", "low", "high", "log", "rounded"),
    [
        (0.00123456, 1e-4, 0.1, True, 0.00123),
        (0.000100001, 1e-4, 0.1, True, 1e-4),
        (1.00567, 1.0, 1.01, True, 1.0057),
        (1000.123456, 1000.0, 1001.0, False, 1000.123),
        (0.99996, 0.1, 0.99997, False, 0.99997),
    ],
)
def test_a_drawn_number_is_rounded_within_its_range(
    drawn: float, low: float, high: float, log: bool, rounded: float
) -> None:
    assert samplers.rounded(drawn, FloatDistribution(low, high, log=log)) == rounded


@pytest.mark.parametrize(
    ("metric", "metrics", "is_done"),
    [
        (None, {"loss": 1.0}, True),
        (None, {}, False),
        ("none", {}, True),
        ("none", {"loss": 1.0}, True),
        ("loss", {"acc": 1.0}, False),
    ],
)
def test_a_trial_of_a_script_has_the_metric_or_any_number_or_the_sweep_has_none(
    opened: Open, metric: str | None, metrics: dict[str, float], is_done: bool
) -> None:
    view = opened(Sweep(Script("t.py", False, ("{a}",)), {"a": ["1"]}, metric=metric))
    trial = claimed(view)
    with contextlib.nullcontext() if is_done else pytest.raises(WrongUse, match=" has reported no"):
        view.done(trial, metrics, 0.0)
    assert _states(view.records()) == ["done" if is_done else "running"]


def test_a_line_that_a_full_disk_has_torn_is_dropped(tmp_path: Path) -> None:
    assert open_study(tmp_path, _SWEEP).claim()
    with (tmp_path / "study.journal").open("ab") as journal:
        journal.write(b'{"op_code":5,"work')
    assert open_study(tmp_path, _SWEEP).claim()
    assert _states(open_study(tmp_path, None).records())[:3] == ["running", "running", "pending"]


def test_both_commands_exit_with_code_4_for_a_damaged_study(here: Here) -> None:
    folder = here.folder / "runs" / "s"
    folder.mkdir(parents=True)
    view = open_study(folder, _SWEEP)
    view.done(claimed(view), {"loss": 1.0}, 1.0)
    lines = (folder / "study.journal").read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:3], b"\0\n", *lines[4:]])
    (folder / "study.journal").write_bytes(damaged)
    for arguments in (
        ("sweep-show", "s"),
        ("sweep", "digits", "--name", "s", "--grid", "width=4,8,16", "--seeds", "4"),
    ):
        err = here.refused(*arguments, code=4, silent=True)
        assert "trainbox: runs/s/study.journal is damaged (" in err
        assert "restore it from a backup, or start a new sweep with another --name" in err
    assert (folder / "study.journal").read_bytes() == damaged


@pytest.mark.parametrize("kept", [None, 0, 1, "no first line", "no last trial"])
def test_a_sweep_that_has_lost_trials_does_not_begin_again_in_their_folders(
    here: Here, kept: int | str | None
) -> None:
    """The new trials would resume the old ones, which have other settings."""
    folder = here.folder / "runs" / "s"
    folder.mkdir(parents=True)
    journal = folder / "study.journal"
    for number in (0, 1):
        before = journal.read_text() if journal.exists() else ""
        claimed(open_study(folder, _SWEEP))
        trial_folder(folder, number).mkdir()
        (trial_folder(folder, number) / "config.json").touch()
    assert [record.number for record in open_study(folder, None).records()] == [*range(12)]
    lines = journal.read_text().splitlines(keepends=True)
    left = {0: "", 1: lines[0], "no first line": "".join(lines[1:]), "no last trial": before}
    journal.unlink()
    if kept is not None:
        journal.write_text(left[kept])
    lost = "trial 1, whose" if kept == "no last trial" else "trial 0 and 1 more, whose"
    err = here.refused(
        *["sweep", "digits", "--name", "s", "--grid", "width=5,6"], code=4, silent=True
    )
    assert f"trainbox: study.journal of the sweep s has lost {lost} folder" in err
    assert "from a backup, or start a new sweep with another --name" in err
    if kept in (0, "no first line"):
        here.refused("sweep-show", "s", code=4, silent=True)
    if kept == "no last trial":  # a copy of a running sweep may have a newer folder
        assert len(open_study(folder, None).records()) == 12


def test_a_sweep_without_its_total_is_damaged_until_it_is_started_again(here: Here) -> None:
    folder = here.folder / "runs" / "s"
    folder.mkdir(parents=True)
    view = open_study(folder, _SWEEP)
    view.done(claimed(view), {"loss": 1.0}, 1.0)
    journal = folder / "study.journal"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"total"' not in line))
    err = here.refused("sweep-show", "s", code=4, silent=True)
    assert "trainbox: runs/s/study.journal is damaged (KeyError('total')): " in err
    assert len(open_study(folder, _SWEEP).records()) == 12
    assert len(open_study(folder, None).records()) == 12


@pytest.mark.parametrize("name", ["trial-1", "trial-run", "trial-0000a"])
def test_a_sweep_begins_beside_runs_with_similar_names(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").touch()
    assert claimed(open_study(tmp_path, _SWEEP)).number == 0


def test_the_folders_of_all_trials_have_the_pattern_of_trials(tmp_path: Path) -> None:
    folders = [trial_folder(tmp_path, number) for number in (0, 7, 99_999)]
    for folder in folders:
        folder.mkdir()
    assert sorted(tmp_path.glob(TRIAL_FOLDERS)) == folders


def test_a_machine_that_waits_for_a_sweep_heeds_signals(tmp_path: Path) -> None:
    stop = StopRequest()
    stop.signal_name = "SIGTERM"
    with pytest.raises(Stopped, match="^stopped by SIGTERM before the sweep: "):
        _wait_for(tmp_path, stop)
