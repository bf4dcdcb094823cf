"""The web page of a sweep, parsed as a browser does."""

import json
import math
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from trainer.sweep.grid import Value
from trainer.sweep.page import page, read_curves
from trainer.sweep.trials import Record


class Parsed(HTMLParser):
    """The parts of a page, with the texts of cells and labels."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "line", "circle", "path", "polyline"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def marks(self, tag: str) -> list[str | None]:
        """Return the trials of all marks with this tag."""
        return [attrs["data-t"] for name, attrs in self.tags if name == tag and "data-t" in attrs]


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
CURVES = {0: [(10, 0.2), (20, 0.5)], 1: [(10, 0.4), (20, 0.9)], 2: [(10, 0.2), (20, 0.3)]}


def test_the_page_has_all_trials_and_charts_of_those_with_a_value() -> None:
    parsed = Parsed(page("s", RECORDS, "accuracy", "max:accuracy", "best: --token=a", CURVES))
    assert parsed.rows == [
        ["trial", "state", "lr", "kind", "seed", "accuracy", "loss", "seconds", "message"],
        ["1", "done", "0.1", "b", "7", "0.9", "0.1", "12.3", ""],
        ["3", "done", "0.01", "b", "7", "0.7", "0.3", "12.3", ""],
        ["0", "done", "0.001", "a", "7", "0.5", "0.5", "12.3", ""],
        ["2", "failed", "0.1", "a", "7", "", "", "12.3", "killed"],
        ["4", "done", "0.01", "a", "7", "nan", "nan", "12.3", ""],
    ]
    assert parsed.texts["h2"] == ["Parallel coordinates", "Slices", "Learning curves", "Trials"]
    assert parsed.texts["pre"] == ["best: --token=(not shown)"]
    # The best trial is drawn last, above the others.
    assert parsed.marks("polyline") == ["0", "3", "1", "2", "0", "1"]
    assert parsed.marks("circle") == ["0", "3", "1"] * 2
    colours = {attrs["data-t"]: attrs["fill"] for tag, attrs in parsed.tags if tag == "circle"}
    assert colours == {"0": "#440154", "3": "#21918c", "1": "#dccd1e"}


def test_the_lowest_loss_is_the_best() -> None:
    parsed = Parsed(page("s", RECORDS, "loss", None, "", {}))
    assert [row[0] for row in parsed.rows[1:]] == ["1", "3", "0", "2", "4"]
    assert "pre" not in parsed.texts


@pytest.mark.parametrize("metric", ["min:accuracy", "max:accuracy"])
def test_equal_trials_have_the_same_colour_and_the_first_is_the_best(metric: str) -> None:
    records = [_record(n, 0.5, lr=float(n)) for n in range(3)]
    parsed = Parsed(page("s", records, "accuracy", metric, "", {}))
    assert [row[0] for row in parsed.rows[1:]] == ["0", "1", "2"]
    assert {attrs["fill"] for tag, attrs in parsed.tags if tag == "circle"} == {"#dccd1e"}


def test_positions_follow_the_values() -> None:
    parsed = Parsed(page("s", RECORDS, "accuracy", None, "", CURVES))
    lines = [attrs["points"] for tag, attrs in parsed.tags if tag == "polyline"]
    # lr spans a factor of 100 and is logarithmic, kind has two categories, and accuracy is linear.
    assert lines[:3] == [
        "70.0,324.0 520.0,251.5 970.0,324.0",
        "70.0,179.0 520.0,106.5 970.0,179.0",
        "70.0,34.0 520.0,106.5 970.0,34.0",
    ]
    circles = [(a["cx"], a["cy"]) for tag, a in parsed.tags if tag == "circle"]
    assert circles[:3] == [("64.0", "204.0"), ("190.0", "117.0"), ("316.0", "30.0")]
    labels = parsed.texts["text"]
    assert [labels.count(text) for text in ("lr", "kind", "accuracy", "step")] == [2, 2, 4, 1]
    assert [labels.count(text) for text in ("0.001", "0.01", "0.1")] == [2, 2, 2]
    assert [labels.count(text) for text in ("a", "b")] == [2, 2]


def test_a_setting_of_numbers_and_names_has_all_as_ticks() -> None:
    records = [_record(n, n / 4, decay=decay) for n, decay in enumerate(("none", 0.5, 0.25))]
    labels = Parsed(page("s", records, "accuracy", None, "", {})).texts["text"]
    assert [labels.count(text) for text in ("none", "0.5", "0.25")] == [2, 4, 2]


def test_labels_do_not_overlap() -> None:
    kinds = ["a" * 30, "b" * 30, "c" * 30, "d" * 30]
    records = [_record(n, 0.5, kind=kinds[n % 4], lr=10.0 ** (2 * n - 20)) for n in range(20)]
    records += [_record(20, 0.6, kind="a" * 30, lr=1e300)]
    parsed = Parsed(page("s", records, "accuracy", None, "", {}))
    labels = [attrs for tag, attrs in parsed.tags if tag == "text"]
    shown = [text for text in parsed.texts["text"] if text.strip()]
    assert len(labels) == len(shown)
    rows: dict[str, list[tuple[float, float]]] = {}
    charts = [tag for tag, _ in parsed.tags if tag in ("svg", "text")]
    chart, found = 0, iter(zip(labels, shown, strict=True))
    for tag in charts:
        if tag == "svg":
            chart += 1
            continue
        attrs, text = next(found)
        if attrs["text-anchor"] == "middle" and chart > 1:  # the slices
            x, half = float(attrs["x"] or ""), len(text) * 3.5
            rows.setdefault(f"{chart} {attrs['y']}", []).append((x - half, x + half))
    ends = [(one[1], two[0]) for row in rows.values() for one, two in pairwise(sorted(row))]
    assert len(ends) >= 6  # four names, and some powers of ten
    assert all(end <= begin for end, begin in ends)


def test_the_command_of_the_best_trial_is_complete() -> None:
    command = f"again: trainbox train {'--option <value> ' * 40}--run best"
    parsed = Parsed(page("s", RECORDS, "accuracy", None, command, {}))
    assert "".join(parsed.texts["pre"]) == command


def test_twelve_settings_have_an_axis_each() -> None:
    point = {f"p{n}": 0.5 for n in range(12)}
    parsed = Parsed(page("s", [_record(0, 0.5, "", **point)], "accuracy", None, "", {}))
    assert [t for t in parsed.texts["text"] if t.startswith("p")] == [*point, *point]


def test_names_and_values_are_text_and_nothing_is_loaded() -> None:
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\udcff\"'&amp;"
    records = [_record(0, 0.5, bad, **{bad: bad}), _record(1, 0.6, **{bad: "x"})]
    records = [Record(r.number, r.state, r.point, 1, {bad: 1.0, **r.metrics}, bad) for r in records]
    text = page(bad, records, bad, None, bad, {})
    text.encode()
    parsed = Parsed(text)
    shown = bad.replace("\udcff", "\\udcff")
    assert parsed.texts["h1"] == parsed.texts["title"][:1] == parsed.texts["pre"] == [shown]
    assert (parsed.rows[0][2], parsed.rows[2][2]) == (shown, "x")
    assert parsed.rows[1][2] == parsed.rows[1][-1] == shown
    tags = [tag for tag, _ in parsed.tags]
    assert (tags.count("script"), tags.count("img")) == (1, 0)
    assert not [a for _, a in parsed.tags if {"src", "href", "onerror"} & a.keys()]
    assert "default-src 'none'" in text
    assert "http" not in text.replace('http-equiv="', "")


@pytest.mark.parametrize(
    "records",
    [
        [],
        [_record(0, -1e308), _record(1, 1e308), _record(2, 5e-324), _record(3, 0)],
        [_record(0, None)],
        [_record(0, 0.5)],
        [_record(0, 0.5, lr=1), _record(1, 0.5, lr=1)],
    ],
)
def test_a_sweep_with_few_results_has_a_page(records: list[Record]) -> None:
    parsed = Parsed(page("s", records, "accuracy", None, "", {}))
    assert len(parsed.rows) == len(records) + 1


def test_a_page_of_a_large_sweep_stays_small() -> None:
    names = [f"setting_{i}" for i in range(14)]
    records = [
        _record(n, n / 6000, "", **{name: n * i / 7 for i, name in enumerate(names)})
        for n in range(6000)
    ]
    curve = [(step, step / 1000) for step in range(1000)]
    text = page("s", records, "accuracy", None, "", dict.fromkeys(range(400), curve))
    assert len(text) < 5e6
    parsed = Parsed(text)
    assert len(parsed.rows) == 3001
    assert "Trials, the best 3,000 of 6,000" in parsed.texts["h2"]
    assert "Learning curves of 200 of 400 trials" in parsed.texts["h2"]
    assert "Slices of 2,000 of 6,000 trials" in parsed.texts["h2"]
    assert (len(parsed.marks("circle")), parsed.marks("circle")[-1]) == (2000 * 12, "5999")


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
        0: [(1, 4), (2, 3)],
        1: [(5, 2), (6, 0.5)],
    }
