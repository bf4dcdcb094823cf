"""One call of `sweep` or `sweep show`."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbox.contract.errors import Failure, NetworkFailure, Preempted, WrongUse
from trainbox.contract.hints import tensorboard
from trainbox.contract.internal import launch_facts
from trainbox.contract.record_folder import CONFIG, is_sweep
from trainbox.contract.storage import writing
from trainer.sweep import page, results
from trainer.sweep.grid import Sweep, trial_folder
from trainer.sweep.runner import POLL_S, SweepRun, print_above_bar
from trainer.sweep.script import Script
from trainer.sweep.slots import Slot
from trainer.sweep.storage import open_storage, storage_failures
from trainer.sweep.study import Study, open_study
from trainer.sweep.work import Work, again, starts_of
from trainer.system.signals import StopRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_JOIN_S = 600.0


def run_sweep(sweep: Sweep, work: Work, values: Mapping[str, Any], stop: StopRequest) -> None:
    """Do this machine's share of a sweep on the launcher's slots, and show the results.

    `values` has the options of the command by their parameters. With --worker, this machine waits
    until another machine has started the sweep, and shows no results.

    Raises:
        Failure: some trials failed; each is recorded with its error.
        Failure: as for `SweepRun.run`.
    """
    folder = values["runs_dir"] / (values["name"] or sweep.default_name)
    storage, joins = values["storage"], values["worker"]
    with storage_failures(storage, folder):
        # Open the study.
        if (folder / CONFIG).exists():
            raise WrongUse(f"{folder} is a run: choose another --name")
        folder.mkdir(parents=True, exist_ok=True)
        if joins:
            _wait_for(storage, folder, stop)
        study = open_study(storage, folder, sweep)
        if values["retry_failed"]:
            study.retry_failed()
        print_above_bar(_header(study, folder, sweep))
        # Train, and show the results.
        named = launch_facts(os.environ).slots or [("the CPU", "")]
        on_gpu = Counter(visible for _, visible in named)
        slots = [
            Slot(slot, visible, on_gpu[visible], worker=work.worker) for slot, visible in named
        ]
        retries, minutes = values["retries"], values["trial_minutes"]
        SweepRun(study, folder, work, slots, retries, minutes, stop).run()
        if not joins:
            _show_all(study, folder)
    if not joins and (failed := [record for record in study.records() if record.state == "failed"]):
        raise Failure(
            f"{len(failed)} of {study.total} trials failed: fix the cause, and train them again "
            f"with --retry-failed; trial {failed[0].number}: {failed[0].message}"
        )


def show(
    study: Study,
    folder: Path,
    metric: str | None = None,
    as_csv: bool = False,
    figure: Path | None = None,
    html: Path | None = None,
) -> str:
    """Return the results of the sweep in `folder` as a table or as CSV.

    With `figure` or `html`, write them to this file instead.

    Raises:
        WrongUse: no such metric.
        StorageFailure: a file cannot be written.
    """
    records = study.records()
    if as_csv:
        return results.as_csv(records)
    goal = results.goal_of(records, metric or study.sweep.metric)
    name = goal[1] if goal else None
    rows = results.rows(records, name)
    # A sampler draws combinations that have one trial, and so no mean.
    drawn = study.sweep.sampler != "grid"
    curves = page.read_curves(folder, records, name) if name and html else {}
    pictures = page.figures(records, [] if drawn else rows, goal, curves) if goal else iter(())
    if figure is not None:
        return _draw(figure, next(pictures, ("", None))[1])
    numbered = {record.number: record for record in records}

    def repeated(number: int) -> str:
        starts = starts_of(trial_folder(folder, number))
        gpus = len(starts[-1]["gpus"]) if starts else None
        return again(study.sweep, numbered[number], folder, gpus)

    combinations = results.best_first(rows, goal) if drawn else rows
    best = results.same_line(records) or results.best_line(rows, goal, repeated)
    lines = "\n".join(filter(None, [best, results.energy_line(records)]))
    if html is None:
        return "\n".join(filter(None, [results.table(combinations, name), lines]))
    title = folder.absolute().name
    text = page.page(title, records, combinations, goal, lines, list(pictures))
    with writing(html, "give another path to --html"):
        html.write_text(text, encoding="utf-8")
    return f"wrote {html}"


def _draw(path: Path, picture: "Figure | None") -> str:
    """Write the figure of a sweep.

    Raises:
        WrongUse: nothing can be drawn, or the format is unknown.
        StorageFailure: the file cannot be written.
    """
    if picture is None:
        raise WrongUse(f"--figure {path}: no trial has a result to draw: wait for one")
    try:
        with writing(path, "give another path to --figure"):
            picture.savefig(path)
    except ValueError as error:  # a format that matplotlib does not have
        raise WrongUse(f"--figure {path}: {error}: use .png, .svg or .pdf") from error
    return f"wrote {path}"


def _header(study: Study, folder: Path, sweep: Sweep) -> str:
    earlier = ""
    if sweep.total < study.total:
        earlier = f" ({sweep.total} requested now, {study.total} before)"
    facts = launch_facts(os.environ)
    rows = {
        "sweep": str(folder),
        "plan": facts.reason or "1 trial at a time",
        **({"settings": facts.settings} if facts.settings else {}),
        "trials": f"{study.total}, {study.unfinished()} to do{earlier}",
    }
    return "\n".join(f"{name:<10} {value}" for name, value in rows.items())


def _show_all(study: Study, folder: Path) -> None:
    """Print the table; write results.csv and the picture, also for TensorBoard.

    Nothing here imports torch. matplotlib draws the picture in about a second of CPU time.
    """
    from trainer.run.event_file import EventFile

    print_above_bar(show(study, folder))
    results.write_csv(folder, study.records())
    picture = ""
    with contextlib.suppress(WrongUse):  # there is nothing to draw
        show(study, folder, figure=folder / "sweep.png")
        picture = ", sweep.png"
        with contextlib.closing(EventFile(folder / "tensorboard")) as file:
            file.picture("sweep", (folder / "sweep.png").read_bytes())
    # Trials of a script have no TensorBoard files.
    is_task = not isinstance(study.sweep.config, Script)
    view = f"; to view all trials: {tensorboard(folder)}" if is_task else ""
    print_above_bar(f"files      {folder}/results.csv{picture}{view}")


def _wait_for(storage: str | None, folder: Path, stop: StopRequest) -> None:
    """Wait until another machine has started the sweep.

    Raises:
        WrongUse: the database at `storage` cannot be opened.
        Preempted: a signal requests a stop.
        NetworkFailure: no machine has started the sweep in time.
    """
    if storage is not None:
        open_storage(storage, folder)
    deadline = time.monotonic() + _JOIN_S
    reported = False
    while True:
        if storage is not None or is_sweep(folder):
            with contextlib.suppress(WrongUse):
                open_study(storage, folder, None)
                return
        if stop:
            raise Preempted(f"stopped by {stop.cause} before the sweep: repeat the command")
        if time.monotonic() > deadline:
            raise NetworkFailure(
                f"--worker: no machine started the sweep {folder} within {_JOIN_S:.0f} s: start "
                "it without --worker on one machine"
            )
        if not reported:
            print_above_bar(f"waiting for another machine to start {folder}")
            reported = True
        time.sleep(POLL_S)
