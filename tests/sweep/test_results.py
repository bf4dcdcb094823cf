"""A sweep's table, CSV and figure, from records."""

import csv
import io
import math

import pytest

from trainer.errors import WrongUse
from trainer.results import as_csv, figure, metric_of, rows, table
from trainer.study import Record

_RECORDS = [
    Record(0, "done", {"width": 4}, 0, {"loss": 1.0, "f1": 0.5}, seconds=2.0),
    Record(1, "done", {"width": 8}, 0, {"loss": 0.25, "f1": 0.75}, seconds=2.5),
    Record(2, "done", {"width": 4}, 1, {"loss": 2.0, "f1": 0.5}, seconds=2.0),
    Record(3, "failed", {"width": 8}, 1, message="out, of memory"),
    Record(4, "done", {"width": 4}, 2, {"loss": 3.0, "f1": 0.5}, seconds=2.0),
    Record(5, "pending", {"width": 8}, 2),
]


def test_the_rows_are_the_textbooks() -> None:
    four, eight = rows(_RECORDS, "loss")
    assert (four.mean, four.deviation) == (2.0, 1.0)
    assert four.half_interval == pytest.approx(4.302653 / math.sqrt(3))  # Student's t with 2 degrees of freedom, 97.5 %
    assert {state: n for state, n in four.counts.items() if n} == {"done": 3}
    assert (eight.mean, math.isnan(eight.deviation)) == (0.25, True)
    assert {state: n for state, n in eight.counts.items() if n} == {"done": 1, "failed": 1, "pending": 1}


def test_the_table() -> None:
    assert table(rows(_RECORDS, "loss"), "loss").splitlines() == [
        "width  done  failed  pending  loss  sd     95 % interval",
        "    4     3       0        0     2   1  -0.4841 to 4.484",
        "    8     1       1        1  0.25   -                 -",
    ]


def test_a_value_that_is_not_finite_is_counted_and_left_out() -> None:
    records = [Record(n, "done", {}, n, {"loss": value}) for n, value in enumerate((1.0, math.nan, 3.0, math.inf))]
    (row,) = rows(records, "loss")
    assert (row.mean, row.counts["done"], row.counts["not finite"]) == (2.0, 4, 2)
    assert "done  not finite  loss" in table([row], "loss")


def test_csv_has_each_trial_once_with_all_its_metrics() -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(_RECORDS))))
    assert [line["trial"] for line in lines] == list("012345")
    assert ",".join(lines[1].values()) == "1,done,8,0,0.25,0.75,2.500,"
    assert list(lines[1]) == ["trial", "state", "width", "seed", "loss", "f1", "seconds", "message"]
    assert lines[3]["message"] == "out, of memory"


def test_the_metric_shown() -> None:
    assert metric_of(_RECORDS, None) == "loss"
    assert metric_of(_RECORDS, "max:f1") == "f1"
    assert metric_of([], None) == "metric"
    with pytest.raises(WrongUse, match="--metric recall: the trials have no metric recall; they have loss, f1"):
        metric_of(_RECORDS, "recall")


def test_a_grid_is_drawn_as_lines_with_bars() -> None:
    both = [Record(r.number, r.state, {**r.point, "kind": "ab"[r.number % 3 == 0]}, r.seed, r.metrics) for r in _RECORDS]
    (axes,) = figure(rows(both, "loss"), both, "loss", drawn=False).axes
    assert axes.get_xlabel() == "width"
    assert axes.get_ylabel() == "loss, mean and 95 % interval"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["kind b", "kind a"]
    assert [tuple(container.lines[0].get_ydata()) for container in axes.containers] == [(1.0,), (0.25, 2.5)]


def test_what_was_drawn_is_drawn_as_points_on_a_scale_that_fits() -> None:
    drawn = [Record(n, "done", {"lr": 10.0**-n, "width": n}, 0, {"loss": float(n)}) for n in range(5)]
    by_lr, by_width = figure(rows(drawn, "loss"), drawn, "loss", drawn=True).axes
    assert (by_lr.get_xscale(), by_width.get_xscale()) == ("log", "linear")
    assert len(by_lr.collections[0].get_offsets()) == 5
