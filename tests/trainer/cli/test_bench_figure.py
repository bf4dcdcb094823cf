"""Draw the figure of a bench from the rows of its bench.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.here import Here
from trainer.programs.outputs.bench_figure import figure


def row(
    scaling: str,
    count: int,
    batch: int,
    median: float | None,
    strategy: str = "ddp",
    workers: int | None = None,
) -> dict[str, Any]:
    each = {"workers": workers}
    case = {"count": count, "strategy": strategy if count > 1 else "single", "batch_size": batch}
    base_batch = batch // count if scaling == "weak" else batch
    base = {"count": 1, "strategy": "single", "batch_size": base_batch}
    return {
        "line": {"scaling": scaling, "case": case | each, "base": base | each},
        "batch_size": batch,
        "samples_per_second": median
        and {"median": median, "least": median - 10, "most": median + 20},
    }


def drawn(
    rows: list[dict[str, Any]], unit: str = "GPU"
) -> list[dict[str, tuple[list[float], list[float]]]]:
    """Return the points of each line that has a label, by panel and label."""
    return [
        {
            label: tuple(map(list, container.lines[0].get_data()))
            for container, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        for axes in figure(rows, unit).axes
    ]


def test_each_scaling_has_a_panel_and_each_constant_setting_a_line() -> None:
    strong = [
        row("strong", 1, 64, 100),
        row("strong", 2, 64, 150, "dp"),
        row("strong", 2, 64, 180),
        row("strong", 1, 128, 110),
    ]
    weak = [row("weak", 1, 64, 100), row("weak", 2, 128, 190), row("weak", 4, 256, None)]
    assert drawn([*strong, *weak]) == [
        {
            "dp, batch 64": ([1, 2], [100, 150]),
            "ddp, batch 64": ([1, 2], [100, 180]),
            "dp, batch 128": ([1], [110]),
            "ddp, batch 128": ([1], [110]),
        },
        {"ddp, 64 each": ([1, 2], [100, 190])},
    ]


def test_one_number_of_gpus_is_drawn_over_the_batch_size() -> None:
    (panel,) = drawn(
        [
            row("", 1, batch, speed, workers=w)
            for batch, speed, w in [(64, 100, 0), (128, 150, 0), (64, 120, 4)]
        ]
    )
    assert panel == {
        "single, 0 workers": ([64, 128], [100, 150]),
        "single, 4 workers": ([64], [120]),
    }


def test_each_number_of_gpus_over_the_batch_size_has_a_line_within_the_limits() -> None:
    rows = [
        row("strong", 1, 64, 100),
        row("strong", 2, 64, 180),
        *(row("", count, 128, 1000 * count) for count in (1, 2)),
    ]
    assert drawn(rows)[1] == {"single on 1": ([128], [1000]), "ddp on 2": ([128], [2000])}
    assert all(
        axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 2020 for axes in figure(rows, "GPU").axes
    )


def test_the_file_is_the_same_each_time(here: Here) -> None:
    report = {"unit": "process", "rows": [row("strong", 1, 64, 100), row("strong", 2, 64, 180)]}
    Path("bench.json").write_text(json.dumps(report))
    pictures = []
    for _ in range(2):
        assert here.command("bench-figure", ".") == (0, "", "")
        pictures.append(Path("bench.svg").read_text())
    assert pictures[0] == pictures[1]
    assert ">ddp, batch 64<" in pictures[0]


@pytest.mark.parametrize("content", [None, "{"])
def test_a_missing_or_damaged_report_is_refused(here: Here, content: str | None) -> None:
    if content:
        Path("bench.json").write_text(content)
    err = here.refused("bench-figure", ".")
    assert "bench.json cannot be read" in err
