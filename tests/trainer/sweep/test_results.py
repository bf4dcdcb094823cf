"""The table, the CSV and the figure of a sweep, from invented records."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.plugins.hparams import plugin_data_pb2

from tests.support.here import Here, board_of
from tests.support.tiny import TINY
from trainbox.errors import WrongUse
from trainbox.options.config import Config
from trainer.session.train import train_task
from trainer.sweep import trial_work
from trainer.sweep.grid import Record, Sweep
from trainer.sweep.results import (
    as_csv,
    best_first,
    best_line,
    changed_line,
    goal_of,
    rows,
    same_line,
    table,
    write_csv,
)
from trainer.system.signals import StopRequest

_RECORDS = [
    Record(0, "done", {"width": 4}, 0, {"loss": 1.0, "f1": 0.5}, seconds=2.0),
    Record(1, "done", {"width": 8}, 0, {"loss": 0.25, "f1": 0.75}, seconds=2.5),
    Record(2, "done", {"width": 4}, 1, {"loss": 2.0, "f1": 0.5}, seconds=2.0),
    Record(3, "failed", {"width": 8}, 1, message="out, of memory"),
    Record(4, "done", {"width": 4}, 2, {"loss": 3.0, "f1": 0.5}, seconds=2.0),
    Record(5, "pending", {"width": 8}, 2),
]


def test_a_row_has_the_mean_deviation_and_interval_of_a_textbook() -> None:
    four, eight = rows(_RECORDS, "loss")
    assert (four.mean, four.deviation) == (2.0, 1.0)
    half = 4.302653 / math.sqrt(3)  # Student's t with 2 degrees of freedom, 97.5 %
    assert four.interval == pytest.approx((2 - half, 2 + half))
    assert {state: n for state, n in four.counts.items() if n} == {"done": 3}
    assert (eight.mean, math.isnan(eight.deviation)) == (0.25, True)
    assert {state: n for state, n in eight.counts.items() if n} == {
        "done": 1,
        "failed": 1,
        "pending": 1,
    }


def test_the_table_has_a_row_per_combination() -> None:
    assert table(rows(_RECORDS, "loss"), "loss").splitlines() == [
        "width  done  failed  pending  loss  sd     95 % interval",
        "    4     3       0        0     2   1  -0.4841 to 4.484",
        "    8     1       1        1  0.25   -                 -",
    ]


@pytest.mark.parametrize(
    ("metric", "values", "interval"),
    [
        ("accuracy", (0.9, 1.0), "0.3147 to 1"),
        ("best_macro_f1", (0.0, 0.1), "0 to 0.6853"),
        ("accuracy", (90.0, 100.0), "31.47 to 158.5"),  # per cent
        ("loss", (0.9, 1.0), "0.3147 to 1.585"),
    ],
)
def test_an_interval_stays_within_the_range_of_its_metric(
    metric: str, values: tuple[float, ...], interval: str
) -> None:
    records = [Record(n, "done", {}, n, {metric: value}) for n, value in enumerate(values)]
    assert table(rows(records, metric), metric).splitlines()[1].endswith(f"  {interval}")


def test_the_best_combination_is_shown_with_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRAINBOX_COMMAND", raising=False)

    def again(number: int) -> str:
        return trial_work.again(Sweep(Config()), _RECORDS[number], Path("runs/s"))

    assert best_line(rows(_RECORDS, "loss"), ("min", "loss"), again).splitlines() == [
        "best:      width=8, lowest loss 0.25 (trial 1)",
        "again:     trainbox train --config runs/s/trial-00001/config.json --run s-best",
    ]
    assert best_line(rows(_RECORDS, "loss"), ("max", "loss"), again).startswith(
        "best:      width=4, highest loss 2 (mean of 3)\n"
    )
    assert best_line(rows(_RECORDS[5:], "loss"), ("min", "loss"), again) == ""
    diverged = [Record(0, "done", {}, 0, {"loss": math.nan}), *_RECORDS[2:3], *_RECORDS[4:5]]
    diverged = [replace(record, point={"width": 4}) for record in diverged]
    assert best_line(rows(diverged, "loss"), ("min", "loss"), str) == (
        "best:      width=4, lowest loss 2.5 (mean of 2)\nagain:     2"
    )
    monkeypatch.setenv("TRAINBOX_COMMAND", "make")
    assert best_line(rows(_RECORDS, "loss"), ("min", "loss"), again).endswith(
        'again:     make train ARGS="--config runs/s/trial-00001/config.json --run s-best"'
    )


def test_drawn_combinations_are_sorted_and_have_no_deviation_columns() -> None:
    drawn = [
        Record(n, "done", {"lr": lr}, 0, {"loss": lr}) for n, lr in enumerate((0.3, 0.01, 0.00123))
    ]
    drawn.append(Record(3, "pruned", {"lr": 0.5}, 0))
    assert table(best_first(rows(drawn, "loss"), ("min", "loss")), "loss").splitlines() == [
        "     lr  done  pruned     loss",
        "0.00123     1       0  0.00123",
        "   0.01     1       0     0.01",
        "    0.3     1       0      0.3",
        "    0.5     0       1        -",
    ]


def test_a_value_that_is_not_finite_is_counted_and_excluded() -> None:
    records = [
        Record(n, "done", {}, n, {"loss": value})
        for n, value in enumerate((1.0, math.nan, 3.0, math.inf))
    ]
    (row,) = rows(records, "loss")
    assert (row.mean, row.counts["done"], row.counts["not finite"]) == (2.0, 4, 2)
    assert "done  not finite  loss" in table([row], "loss")


def test_csv_has_one_line_per_trial_with_all_its_metrics() -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(_RECORDS))))
    assert [line["trial"] for line in lines] == list("012345")
    assert ",".join(lines[1].values()) == "1,done,8,0,0.25,0.75,2.500,"
    assert list(lines[1]) == ["trial", "state", "width", "seed", "loss", "f1", "seconds", "message"]
    assert lines[3]["message"] == "out, of memory"


def test_the_shown_metric_is_the_requested_or_the_first() -> None:
    assert goal_of(_RECORDS, None) == ("min", "loss")
    assert goal_of(_RECORDS, "min:f1") == ("min", "f1")
    assert goal_of([], "f1") == ("max", "f1")
    assert goal_of([], None) is None
    assert goal_of(_RECORDS, "none") is None
    assert table(rows(_RECORDS, None), None).splitlines()[0] == "width  done  failed  pending"
    with pytest.raises(WrongUse, match="the trials have no metric recall: use one of loss, f1"):
        goal_of(_RECORDS, "recall")


def test_any_text_is_written(tmp_path: Path) -> None:
    records = [Record(0, "done", {"$b_$": "\\x"}, 0, {"\ud800": 1.0}, "\udcff")]
    write_csv(tmp_path, records)
    heading, first = (tmp_path / "results.csv").read_text().splitlines()
    assert heading == r"trial,state,$b_$,seed,\ud800,seconds,message"
    assert first == r"0,done,\x,0,1.0,,\udcff"


def test_tensorboard_shows_the_swept_settings_first_even_with_default_values(
    here: Here,
) -> None:
    config, stop = Config(task=TINY, epochs=1, fields={"noise": 0.5}), StopRequest()
    train_task(
        config,
        stop,
        "cpu",
        Path("runs"),
        "r",
        Path("data"),
        "auto",
        swept=["noise", "optimizer", "patience"],
    )
    board = board_of(here.path())
    content = board.SummaryMetadata("_hparams_/experiment").plugin_data.content
    infos = plugin_data_pb2.HParamsPluginData.FromString(content).experiment.hparam_infos
    assert {info.name for info in infos if info.differs} == {"optimizer", "patience", "task.noise"}
    assert {"batch_size", "epochs", "seed", "task"} <= {
        info.name for info in infos if not info.differs
    }


def _trials(*losses: float) -> list[Record]:
    return [
        Record(n, "done", {"lr": n // 2}, n % 2, {"loss": loss, "samples_per_second": n})
        for n, loss in enumerate(losses)
    ]


def test_values_that_change_nothing_are_named() -> None:
    assert same_line(_trials(0.5, 0.25, 0.5, 0.25)) == (
        "same:      all values of lr gave the same metrics: check that the task uses them"
    )
    assert same_line(_trials(0.5, 0.25, 0.5, 0.375)) == ""
    assert same_line(_trials(0.5, 0.5)) == ""  # one combination


@pytest.mark.parametrize(("losses", "names"), [((1, 1, 2, 2), "depth"), ((1, 2, 1, 2), "width")])
def test_one_setting_of_two_that_changes_nothing_is_named(
    losses: tuple[float, ...], names: str
) -> None:
    points = [{"width": width, "depth": depth} for width in (4, 8) for depth in (1, 2)]
    records = [
        Record(number, "done", point, 0, {"loss": float(loss)}, seconds=1.0)
        for number, (point, loss) in enumerate(zip(points, losses, strict=True))
    ]
    assert f"all values of {names} gave the same metrics" in same_line(records)


def test_files_that_have_changed_between_trials_are_named() -> None:
    before, after = {"mine": "1", "helper": "2"}, {"mine": "3", "other": "4"}
    assert changed_line({0: before, 1: before, 2: {**before, "other": "4"}, 3: {}}) == ""
    assert changed_line({0: before, 1: before, 2: after, 3: before}) == (
        "changed:   mine differs between trials such as 0 and 2: check whether their results "
        "compare, or train all again with another --name"
    )
