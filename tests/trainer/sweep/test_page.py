"""The web page and the figures of a sweep."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trainer.sweep.grid import Record, Value
from trainer.sweep.page import Curve, figures, means, page, read_curves
from trainer.sweep.results import rows


class Parsed(HTMLParser):
    """The tags of a page, the texts in them, and the rows of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif self._open:
            self.texts.setdefault(self._open[-1], []).append(data)


def _record(number: int, accuracy: float | None, message: str = "", **point: Value) -> Record:
    metrics = {} if accuracy is None else {"accuracy": accuracy, "loss": 1 - accuracy}
    state = "failed" if accuracy is None else "done"
    return Record(number, state, point, 7, metrics, message, 12.345)


RECORDS = [
    _record(0, 0.5, lr=0.001, kind="a"),
    _record(1, 0.9, lr=0.1, kind="b"),
    _record(2, None, "killed", lr=0.1, kind="a"),
    _record(3, 0.7, lr=0.01, kind="b"),
    _record(4, math.nan, lr=0.01, kind="a"),
]
CURVES: dict[int, Curve] = {0: {10: 0.2, 20: 0.5}, 1: {10: 0.4, 20: 0.9}, 2: {10: 0.2, 20: 0.3}}
_HIGHEST = ("max", "accuracy")


def _page(
    records: list[Record], goal: tuple[str, str] | None = _HIGHEST, best: str = "", name: str = "s"
) -> str:
    metric = goal[1] if goal else None
    pictures = list(figures(records, [], goal, CURVES)) if goal else []
    return page(name, records, rows(records, metric), goal, best, pictures)


def test_the_page_has_the_results_the_figures_and_all_trials_best_first() -> None:
    parsed = Parsed(_page(RECORDS, best="best: --token=a"))
    assert parsed.rows == [
        ["lr", "kind", "done", "not finite", "failed", "accuracy"],
        ["0.001", "a", "1", "0", "0", "0.5"],
        ["0.1", "b", "1", "0", "0", "0.9"],
        ["0.1", "a", "0", "0", "1", "-"],
        ["0.01", "b", "1", "0", "0", "0.7"],
        ["0.01", "a", "1", "1", "0", "-"],
        ["trial", "state", "lr", "kind", "seed", "accuracy", "loss", "seconds", "message"],
        ["1", "done", "0.1", "b", "7", "0.9", "0.1", "12.345", ""],
        ["3", "done", "0.01", "b", "7", "0.7", "0.3", "12.345", ""],
        ["0", "done", "0.001", "a", "7", "0.5", "0.5", "12.345", ""],
        ["2", "failed", "0.1", "a", "7", "", "", "12.345", "killed"],
        ["4", "done", "0.01", "a", "7", "-", "-", "12.345", ""],
    ]
    titles = ["Results", "Slices", "Parallel coordinates", "Learning curves", "Trials"]
    assert parsed.texts["h2"] == titles
    assert parsed.texts["pre"] == ["best: --token=(not shown)"]
    images = [attrs for tag, attrs in parsed.tags if tag == "img"]
    assert [image["alt"] for image in images] == titles[1:4]
    assert all((image["src"] or "").startswith("data:image/png;base64,iVBOR") for image in images)
    lowest = Parsed(_page(RECORDS, ("min", "accuracy")))
    assert [row[0] for row in lowest.rows[-5:]] == ["0", "3", "1", "2", "4"]


def test_the_figures_have_the_finished_trials_on_scales_that_fit() -> None:
    drawn = dict(figures(RECORDS, [], _HIGHEST, CURVES))
    by_kind, by_lr, *_ = drawn["Slices"].axes
    assert (by_kind.get_xlabel(), by_lr.get_xlabel()) == ("kind", "lr")
    assert by_lr.get_xscale() == "log"
    points = by_lr.collections[0].get_offsets()
    assert sorted(points.tolist()) == [[0.001, 0.5], [0.01, 0.7], [0.1, 0.9]]
    (curves,) = drawn["Learning curves"].axes
    assert [list(line.get_ydata()) for line in curves.lines] == [[0.2, 0.5], [0.4, 0.9], [0.2, 0.3]]
    assert curves.get_ylabel() == "accuracy"


def test_values_that_are_numbers_in_text_have_a_number_axis() -> None:
    records = [
        Record(n, "done", {"lr": lr}, 0, {"loss": 1.0}) for n, lr in enumerate(("1e-3", "0.1"))
    ]
    (axes,) = means(rows(records, "loss"), "loss").axes
    assert tuple(axes.dataLim.intervalx) == pytest.approx((1e-3, 0.1))
    sliced = dict(figures(records, [], ("min", "loss"), {}))["Slices"].axes[0]
    assert sorted(x for x, _ in sliced.collections[0].get_offsets()) == [1e-3, 0.1]


def test_a_grid_is_drawn_as_lines_with_bars() -> None:
    records = [
        Record(n, "done", {"width": width, "kind": kind}, 0, {"loss": loss})
        for n, (width, kind, loss) in enumerate(
            [(4, "a", 1.0), (8, "b", 0.25), (4, "b", 2.0), (4, "b", 3.0)]
        )
    ]
    (axes,) = means(rows(records, "loss"), "loss").axes
    assert axes.get_xlabel() == "width"
    assert axes.get_ylabel() == "loss, mean and 95 % interval"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["kind a", "kind b"]
    lines = [list(container.lines[0].get_ydata()) for container in axes.containers]
    assert lines == [[1.0], [0.25, 2.5]]


def test_names_and_values_are_text_and_nothing_is_loaded(tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\udcff\"'&amp;$a_$"
    records = [
        Record(n, "done", {bad: value, "x": bad}, 1, {bad: float(n)}, bad)
        for n, value in enumerate((bad, "x"))
    ]
    text = _page(records, ("min", bad), bad, bad)
    means(rows(records, bad), bad).savefig(tmp_path / "means.svg")
    text.encode()
    parsed = Parsed(text)
    shown = bad.replace("\udcff", "\\udcff")
    assert parsed.texts["h1"] == parsed.texts["title"] == parsed.texts["pre"] == [shown]
    assert parsed.rows[0][:2] == [shown, "x"]
    assert parsed.rows[-2][2] == parsed.rows[-2][-1] == shown
    tags = [tag for tag, _ in parsed.tags]
    assert (tags.count("script"), tags.count("img")) == (0, 3)
    assert not [a for _, a in parsed.tags if {"href", "onerror"} & a.keys()]
    assert "default-src 'none'" in text
    assert "http" not in re.sub(r'http-equiv=|base64,[^"]*', "", text)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [_record(0, -1e308), _record(1, 1e308), _record(2, 5e-324), _record(3, 0)],
        [_record(0, -1e308, lr=1), _record(1, 5e-324, lr=2), _record(3, 0, lr=3)],
        [_record(0, None)],
        [_record(0, 0.5)],
        [_record(0, 0.5, lr=1), _record(1, 0.5, lr=1)],
    ],
)
def test_a_sweep_with_few_results_has_a_page(records: list[Record]) -> None:
    for goal in (_HIGHEST, None):
        assert Parsed(_page(records, goal)).texts["h2"][-1] == "Trials"


def test_a_page_of_a_large_sweep_stays_small() -> None:
    names = [f"setting_{i}" for i in range(8)]
    records = [
        _record(n, n / 6000, "", **{name: n * i / 7 for i, name in enumerate(names)})
        for n in range(6000)
    ]
    text = page("s", records, rows(records, None)[:1], _HIGHEST, "", [])
    assert len(text) < 2e6
    parsed = Parsed(text)
    assert (len(parsed.rows), parsed.rows[3][0]) == (2003, "5999")
    assert "Trials, the best 2,000 of 6,000" in parsed.texts["h2"]


def test_curves_are_the_validations_or_else_the_reports(tmp_path: Path) -> None:
    entries = {
        0: [
            {"kind": "train", "step": 1, "loss": 9},
            {"kind": "validation", "step": 2, "loss": 3},
            {"kind": "validation", "step": 1, "loss": 4},
            {"kind": "validation", "step": 3, "loss": None},
        ],
        1: [{"step": 5, "loss": 2}, {"step": 6, "loss": 1}, {"step": 6, "loss": 0.5}],
        2: [
            {"step": 5, "loss": 2},
            {"step": 10**400, "loss": 1},
            {"step": 6, "loss": "x"},
            {"step": 7, "loss": 10**400},
        ],
    }
    for number, lines in entries.items():
        folder = tmp_path / f"trial-{number:05d}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    records = [_record(number, 0.5) for number in range(4)]
    assert read_curves(tmp_path, records, "loss") == {
        0: {1: 4, 2: 3},
        1: {5: 2, 6: 0.5},
    }
