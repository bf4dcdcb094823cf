"""The figures of a sweep, and one web page with its tables and figures.

Pure, except for `read_curves`. matplotlib is imported when a figure is drawn.
"""

import base64
import contextlib
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbox.contract.entries import EntryReader, step_of
from trainbox.contract.markup import escaped
from trainbox.contract.record_folder import METRICS
from trainbox.contract.secret_rule import without_secrets
from trainer.sweep.grid import Record, Value, trial_folder
from trainer.sweep.results import CombinationRow, cells, shown, trial_lines

if TYPE_CHECKING:
    import optuna
    from matplotlib.figure import Figure

Curve = dict[int, float]  # the metric by step

# A page with these limits is smaller than a few MB, and is drawn in seconds.
_MOST_CURVES, _MOST_DRAWN, _MOST_ROWS = 100, 2000, 2000
_LARGEST_VALUE = 2.0**63
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1080px; padding: 0 1rem;
  color: #222; background: #fff }
pre, .wide { overflow: auto }
img { display: block; max-width: 100%; min-width: 30rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #ddd }
"""


def read_curves(folder: Path, records: Sequence[Record], metric: str) -> dict[int, Curve]:
    """Return the metric over the steps for each trial that has more than one value of it."""
    curves = {}
    for record in records:
        found: dict[bool, Curve] = {True: {}, False: {}}
        for entry in EntryReader(trial_folder(folder, record.number) / METRICS).read():
            step, value = step_of(entry), entry.get(metric)
            if step is not None and isinstance(value, int | float) and _is_drawn(value):
                found[entry.get("kind") == "validation"][step] = float(value)
        # A task also reports a training loss, but its trials are compared by validations.
        curve = found[True] or found[False]
        if len(curve) > 1:
            curves[record.number] = curve
    return curves


def _is_drawn(value: float) -> bool:
    return -_LARGEST_VALUE < value < _LARGEST_VALUE


def means(combinations: Sequence[CombinationRow], metric: str) -> "Figure":
    """Draw the means and intervals over the first setting, one line per choice of the others."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in combinations for name in row.point))
    first, others = names[0] if names else "", names[1:]
    lines: dict[str, list[tuple[Value, CombinationRow]]] = {}
    for row in combinations:
        if not math.isnan(row.mean):
            label = ", ".join(f"{name} {row.point.get(name)}" for name in others)
            lines.setdefault(label, []).append((row.point.get(first, "all"), row))
    is_numeric = all(as_number(x) is not None for line in lines.values() for x, _ in line)
    with _drawing():
        picture = Figure(figsize=(7, 4.2), dpi=110, layout="constrained")
        axes = picture.add_subplot()
        for label, line in lines.items():
            x: list[Any] = [as_number(value) if is_numeric else _plain(value) for value, _ in line]
            y = [row.mean for _, row in line]
            bars = [
                [0.0 if math.isnan(r.deviation) else abs(r.mean - r.interval[i]) for _, r in line]
                for i in (0, 1)
            ]
            axes.errorbar(x, y, bars, marker="o", capsize=3, label=_plain(label) or None)
        if len(lines) > 1:
            axes.legend(frameon=False)
        axes.set_xlabel(_plain(first))
        axes.set_ylabel(f"{_plain(metric)}, mean and 95 % interval")
        axes.grid(alpha=0.3)
    return picture


def figures(
    records: Sequence[Record],
    combinations: Sequence[CombinationRow],
    goal: tuple[str, str],
    curves: Mapping[int, Curve],
) -> Iterator[tuple[str, "Figure"]]:
    """Yield the titles and figures that can be drawn: means, if there are `combinations`, then all.

    Each one is drawn when it is taken.
    """
    if combinations:
        yield "Means", means(combinations, goal[1])
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as charts

    done = [r for r in records if r.state == "done" and r.point]
    done = [r for r in done if _is_drawn(r.metrics.get(goal[1], math.nan))]
    done = done[:: math.ceil(len(done) / _MOST_DRAWN) or 1]
    few = [record for record in records if record.number in curves][:_MOST_CURVES]
    name = {"target_name": _plain(goal[1])}
    for title, draw, drawn, labels in (
        ("Slices", charts.plot_slice, done, name),
        ("Parallel coordinates", charts.plot_parallel_coordinate, done, name),
        ("Learning curves", charts.plot_intermediate_values, few, {}),
    ):
        if drawn:
            with _drawing():
                draw(_study(drawn, goal, curves), **labels)
                picture = pyplot.gcf()
                if drawn is few:
                    picture.axes[0].set_ylabel(_plain(goal[1]))
                    picture.axes[0].legend().remove()
                pyplot.close(picture)
            yield title, picture


def as_number(value: Value) -> float | None:
    """Return a setting as a number, or None. The values of a script are numbers in text."""
    if isinstance(value, bool):
        return None
    with contextlib.suppress(ValueError):
        return number if math.isfinite(number := float(value)) else None
    return None


def page(
    name: str,
    records: Sequence[Record],
    combinations: Sequence[CombinationRow],
    goal: tuple[str, str] | None,
    best: str,
    pictures: Sequence[tuple[str, "Figure"]],
) -> str:
    """Return the page as HTML.

    Args:
        name: the name of the sweep.
        records: its trials.
        combinations: its results.
        goal: `min` or `max`, and the metric that is shown.
        best: the lines about the best combination.
        pictures: the titles and figures.
    """
    sign, metric = (1 if goal and goal[0] == "min" else -1), goal[1] if goal else None

    def rank(record: Record) -> tuple[bool, float]:
        value = record.metrics.get(metric or "", math.nan)
        is_ranked = record.state == "done" and math.isfinite(value)
        return (False, sign * value) if is_ranked else (True, 0.0)

    few = f", the best {_MOST_ROWS:,} of {len(records):,}" if len(records) > _MOST_ROWS else ""
    parts = [f"<h1>{escaped(name)}</h1>", f"<pre>{escaped(without_secrets(best))}</pre>"]
    parts += ["<h2>Results</h2>", _table(cells(combinations, metric))]
    for title, picture in pictures:
        png = io.BytesIO()
        picture.savefig(png, format="png", bbox_inches="tight")
        data = base64.b64encode(png.getvalue()).decode()
        image = f'<img alt="{title}" src="data:image/png;base64,{data}">'
        parts.append(f'<h2>{title}</h2>\n<div class="wide">{image}</div>')
    lines = trial_lines(sorted(records, key=rank)[:_MOST_ROWS])
    parts += [f"<h2>Trials{few}</h2>", _table(lines)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _table(lines: Sequence[Sequence[object]]) -> str:
    def row(tag: str, line: Sequence[object]) -> str:
        texts = (shown(value) if isinstance(value, float) else value for value in line)
        return f"<tr>{''.join(f'<{tag}>{escaped(text)}</{tag}>' for text in texts)}</tr>"

    rows = [row("th", lines[0]), *(row("td", line) for line in lines[1:])]
    return '<div class="wide"><table>\n' + "\n".join(rows) + "\n</table></div>"


def _study(
    records: Sequence[Record], goal: tuple[str, str], curves: Mapping[int, Curve]
) -> "optuna.Study":
    """Return trials as a study in memory, for Optuna's figures. Those without a result are pruned.

    Numbers in text are numbers there, if all values of the setting are numbers.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize" if goal[0] == "min" else "maximize")
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for record in records for name in record.point):
        texts = [record.point.get(name, "") for record in records]
        numbers = [as_number(text) for text in texts]
        columns[_plain(name)] = [_plain(t) for t in texts] if None in numbers else numbers
    space = {name: _distribution(values) for name, values in columns.items()}
    for index, record in enumerate(records):
        value = record.metrics.get(goal[1]) if record.state == "done" else None
        trial = create_trial(
            state=TrialState.PRUNED if value is None else TrialState.COMPLETE,
            value=value,
            params={name: values[index] for name, values in columns.items()},
            distributions=space,
            intermediate_values=dict(curves.get(record.number, {})),
        )
        study.add_trial(trial)
    return study


def _distribution(values: Sequence[Any]) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if isinstance(values[0], str):
        return CategoricalDistribution(list(dict.fromkeys(values)))
    low, high = min(values), max(values)
    return FloatDistribution(low, high, log=0 < 100 * low <= high)


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """Draw without a display, text as it is, and without the warning of Optuna's figures."""
    import matplotlib

    matplotlib.use("agg")
    with warnings.catch_warnings(), matplotlib.rc_context({"text.parse_math": False}):
        warnings.simplefilter("ignore")
        yield


def _plain(text: object) -> str:
    """Return a text that matplotlib can write. A name of a file may have other bytes."""
    return str(text).encode(errors="backslashreplace").decode()
