"""The figure of a sweep, from invented records. Its texts and points are read from SVG."""

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trainer.sweep.figure import write_figure
from trainer.sweep.grid import Record, Value

_SVG = "{http://www.w3.org/2000/svg}"


def _record(number: int, loss: float | None, **point: Value) -> Record:
    state, metrics = ("failed", {}) if loss is None else ("done", {"loss": loss})
    return Record(number, state, point, number, metrics)


def _drawn(
    folder: Path, records: list[Record], is_drawn: bool = False, direction: str = "min"
) -> tuple[list[str], int]:
    """Return the texts of the figure, and the number of its points."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert write_figure(folder / "f.svg", records, (direction, "loss"), is_drawn)
    root = ElementTree.parse(folder / "f.svg").getroot()  # noqa: S314 - our own file
    texts = ["".join(node.itertext()).strip() for node in root.iter(f"{_SVG}text")]
    groups = [
        group for group in root.iter(f"{_SVG}g") if re.match(r"PathCollection", group.get("id", ""))
    ]
    return texts, sum(len(list(group.iter(f"{_SVG}use"))) for group in groups)


def test_a_grid_has_a_row_for_each_combination_and_a_point_for_each_seed(tmp_path: Path) -> None:
    records = [
        _record(number, loss, width=width, lr=0.001)
        for number, (width, loss) in enumerate(
            [(4, 1.0), (8, 0.5), (4, 2.0), (8, 0.6), (8, None), (4, math.nan)]
        )
    ]
    texts, points = _drawn(tmp_path, records)
    assert [text for text in texts if "=" in text] == ["width=4, lr=0.001", "width=8, lr=0.001"]
    assert "loss (points: trials; line: mean)" in texts
    assert points == 4


def test_many_seeds_have_a_box(tmp_path: Path) -> None:
    records = [_record(number, math.sin(number)) for number in range(300)]
    texts, points = _drawn(tmp_path, records)
    assert "all trials" in texts
    assert "loss (points: trials; box: median and quartiles)" in texts
    assert points == 300


@pytest.mark.parametrize(("direction", "first"), [("min", "width=0"), ("max", "width=99")])
def test_of_many_combinations_the_best_are_drawn(
    tmp_path: Path, direction: str, first: str
) -> None:
    records = [_record(number, float(number), width=number) for number in range(100)]
    texts, points = _drawn(tmp_path, records, direction=direction)
    names = [text for text in texts if "=" in text]
    assert (len(names), names[0], points) == (40, first, 40)
    assert "the best 40 of 100 combinations" in texts


def test_drawn_settings_have_a_panel_each(tmp_path: Path) -> None:
    """The values of a script are numbers in text."""
    records = [
        _record(number, float(number), lr=f"{10.0 ** -(1 + number % 4)}", kind="ab"[number % 2])
        for number in range(8)
    ]
    texts, points = _drawn(tmp_path, records, is_drawn=True)
    assert {"lr", "kind", "a", "b", "loss"} <= set(texts)
    assert points == 2 * 8


def test_without_a_result_nothing_is_drawn(tmp_path: Path) -> None:
    records = [_record(0, None, width=4), _record(1, math.inf, width=8)]
    assert not write_figure(tmp_path / "f.png", records, ("min", "loss"), False)
    assert not (tmp_path / "f.png").exists()


def test_any_name_and_value_can_be_drawn(tmp_path: Path) -> None:
    bad = "$a_$<b>\udcff\n日"
    records = [
        Record(n, "done", {bad: value}, 1, {bad: -1e299}) for n, value in enumerate((bad, 1))
    ]
    for is_drawn in (True, False):
        assert write_figure(tmp_path / "f.png", records, ("min", bad), is_drawn)
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
