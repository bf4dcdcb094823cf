"""Draw the figure of `trainbox bench` from its bench.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbox.errors import WrongUse
from trainbox.files.regular_files import read_object
from trainbox.folders.write_failures import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLES = {
    "strong": "strong: fixed batch",
    "weak": "weak: fixed batch per GPU",
    "": "speed",
}


def draw(folder: Path) -> None:
    """Draw bench.svg from the bench.json in `folder`.

    Raises:
        WrongUse: bench.json is missing or damaged.
        StorageFailure: bench.svg cannot be written.
    """
    try:
        report = read_object(folder / "bench.json")
    except (OSError, ValueError) as error:
        raise WrongUse(
            f"{folder}/bench.json cannot be read ({error}): give the folder that `trainbox "
            "bench --out` wrote"
        ) from error
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "bench", "svg.fonttype": "none"}):
        picture = figure(report["rows"], report["unit"])
        with writing(folder, "give another folder"):
            picture.savefig(folder / "bench.svg", metadata={"Date": None})


def figure(rows: Sequence[Mapping[str, Any]], unit: str) -> "Figure":
    """Return a figure of the samples/s over the number of GPUs.

    Bars reach from the slowest to the fastest round, and dots show a linear speedup. If all rows
    have the same number of GPUs, the figure is over the batch size. `unit` is GPU or process.
    """
    from matplotlib.figure import Figure

    scalings = list(dict.fromkeys(row["line"]["scaling"] for row in rows))
    picture = Figure(figsize=(0.8 + 4.6 * len(scalings), 4.2), layout="constrained")
    panels = picture.subplots(1, len(scalings), sharey=True, squeeze=False)[0]
    for axes, scaling in zip(panels, scalings, strict=True):
        ours = [row for row in rows if row["line"]["scaling"] == scaling]
        for label, points in _series(ours).items():
            x, speeds = zip(*points, strict=True)
            y = [speed["median"] for speed in speeds]
            below = [speed["median"] - speed["least"] for speed in speeds]
            above = [speed["most"] - speed["median"] for speed in speeds]
            drawn = axes.errorbar(x, y, [below, above], marker="o", capsize=3, label=label)
            if scaling:
                linear = [y[0] * count / x[0] for count in x]
                axes.plot(x, linear, ":", color=drawn[0].get_color(), linewidth=1)
        axes.set_title(_TITLES[scaling], fontsize="medium")
        axes.set_xlabel(("GPUs" if unit == "GPU" else "processes") if scaling else "batch")
        if not scaling:
            axes.set_xscale("log", base=2)
        ticks = sorted({tick for row in rows if (tick := _x(row))})
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize="small")
    panels[0].set_ylim(bottom=0)  # for all panels, after all of them have their points
    panels[0].set_ylabel("samples/s, median and range" + ("; dots: linear" if scalings[0] else ""))
    return picture


def _series(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, Mapping[str, float]]]]:
    """Return the points (x, speed) of each line by its label.

    The label names what is constant along the line. The point of one GPU is the first of each
    strategy's line.
    """
    used = dict.fromkeys(row["line"]["case"]["strategy"] for row in rows)
    strategies = [name for name in used if name != "single"] or ["single"]
    several = len({row["line"]["case"]["count"] for row in rows}) > 1
    found: dict[str, list[tuple[int, Mapping[str, float]]]] = {}
    for row in rows:
        case, scaling = row["line"]["case"], row["line"]["scaling"]
        if row["samples_per_second"] is None:
            continue
        base = row["line"]["base"]
        if not scaling:
            batch = f" on {case['count']}" if several else ""
        elif base["batch_size"] is None:
            batch = ""
        elif scaling == "weak":
            batch = f", {base['batch_size'] // base['count']} each"
        else:
            batch = f", batch {base['batch_size']}"
        workers = "" if case["workers"] is None else f", {case['workers']} workers"
        shared = case["strategy"] == "single" and scaling
        for strategy in strategies if shared else [case["strategy"]]:
            points = found.setdefault(f"{strategy}{batch}{workers}", [])
            points.append((_x(row), row["samples_per_second"]))
    return found


def _x(row: Mapping[str, Any]) -> int:
    """Return the number of GPUs, or the size of the batch without a scaling."""
    line = row["line"]
    return int(line["case"]["count"] if line["scaling"] else row["batch_size"] or 0)
