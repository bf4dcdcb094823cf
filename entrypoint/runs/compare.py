"""The table of `trainbox compare` for runs of scripts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoint.runs.read import NO_METRICS, StoredRun, number_of, stored_run
from entrypoint.runs.table import aligned, text_of_setting
from trainbox.errors import WrongUse
from trainbox.files.entries import EntryReader, is_of_script
from trainbox.folders.record_folder import METRICS

_LAST_BYTES = 2**20  # of metrics.jsonl, in which the newest metrics are


def compare_scripts(folders: Sequence[Path]) -> str:
    """Return a table of the arguments that differ between runs of scripts, and their last metrics.

    Raises:
        WrongUse: there are fewer than two runs.
    """
    if len({folder.resolve() for folder in folders}) < 2:
        raise WrongUse("compare needs two different runs: give their folders")
    runs = [run for folder in folders if (run := stored_run(folder)) is not None]
    return table(runs, [_last_metrics(folder) for folder in folders])


def table(runs: Sequence[StoredRun], metrics: Sequence[Mapping[str, float]]) -> str:
    """Return the table; `metrics` has the last metrics of each run."""
    settings = [{"script": run.task, **run.settings} for run in runs]
    names = dict.fromkeys(name for each in settings for name in each)
    cells = {name: [text_of_setting(each, name) for each in settings] for name in names}
    different = [[f"  {name}", *row] for name, row in cells.items() if len({*row}) > 1]
    reported = [
        [f"  {name}", *(f"{each[name]:.4g}" if name in each else "-" for each in metrics)]
        for name in dict.fromkeys(name for each in metrics for name in each)
    ]
    rows = [["", *(run.name for run in runs)], *_titled("arguments", different, "the same")]
    rows += [["state", *(run.state for run in runs)]]
    return "\n".join(aligned([*rows, *_titled("last metrics", reported, "none")]))


def _titled(title: str, rows: list[list[str]], otherwise: str) -> list[list[str]]:
    return [[title], *rows] if rows else [[title, otherwise]]


def _last_metrics(folder: Path) -> dict[str, float]:
    """Return the newest value of each number that the script has reported."""
    found: dict[str, float] = {}
    for entry in filter(is_of_script, EntryReader(folder / METRICS, _LAST_BYTES).read()):
        kind = entry.get("kind", "train")
        for name, reported in entry.items():
            value = None if name in NO_METRICS else number_of(reported)
            if value is not None:
                found[name if kind == "train" else f"{kind} {name}"] = value
    return found
