"""One call of `sweep` or `sweep show`."""

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainbox.disclosure.suggested_commands import tensorboard
from trainbox.errors import Failure, NetworkFailure, Stopped, WrongUse
from trainbox.folders.record_folder import CONFIG, is_sweep
from trainbox.folders.write_failures import writing
from trainbox.processes.environment import launch_facts
from trainer.sweep import results
from trainer.sweep.figure import write_figure
from trainer.sweep.grid import Sweep, trial_folder
from trainer.sweep.runner import POLL_S, SweepRun, print_above_bar
from trainer.sweep.script_template import Script
from trainer.sweep.slots import Slot
from trainer.sweep.study import Study, open_study
from trainer.sweep.trial_work import Work, again, sources_of, starts_of
from trainer.system.signals import StopRequest

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
    joins = values["worker"]
    with writing(folder):
        # Open the study.
        if (folder / CONFIG).exists():
            raise WrongUse(f"{folder} is a run: choose another --name")
        folder.mkdir(parents=True, exist_ok=True)
        if joins:
            _wait_for(folder, stop)
        study = open_study(folder, sweep)
        if values["retry_failed"]:
            study.retry_failed()
        print_above_bar(_header(study, folder, sweep))
        # Train, and show the results.
        named = launch_facts(os.environ).slots or [("the CPU", "")]
        slots = [Slot(slot, visible, worker=work.worker) for slot, visible in named]
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
) -> str:
    """Return the results of the sweep in `folder` as a table or as CSV.

    With `figure`, draw them to this file instead.

    Raises:
        WrongUse: no such metric, nothing can be drawn, or the format of the figure is unknown.
        StorageFailure: a file cannot be written.
    """
    records = study.records()
    if as_csv:
        return results.as_csv(records)
    goal = results.goal_of(records, metric or study.sweep.metric)
    name = goal[1] if goal else None
    rows = results.rows(records, name)
    is_drawn = study.sweep.sampler != "grid"
    if figure is not None:
        try:
            with writing(figure, "give another path to --figure"):
                if goal is None or not write_figure(figure, records, goal, is_drawn):
                    raise WrongUse(
                        f"--figure {figure}: no trial has a result to draw: wait for one"
                    )
        except ValueError as error:  # a format that matplotlib does not have
            raise WrongUse(f"--figure {figure}: {error}: use .png, .svg or .pdf") from error
        return f"wrote {figure}"
    numbered = {record.number: record for record in records}

    def repeated(number: int) -> str:
        starts = starts_of(trial_folder(folder, number))
        gpus = len(starts[-1]["gpus"]) if starts else None
        return again(study.sweep, numbered[number], folder, gpus)

    combinations = results.best_first(rows, goal) if is_drawn else rows
    done = (record.number for record in records if record.state == "done")
    sources = {number: sources_of(trial_folder(folder, number)) for number in done}
    lines = [
        results.changed_line(sources),
        results.same_line(records),
        results.best_line(rows, goal, repeated),
    ]
    return "\n".join(filter(None, [results.table(combinations, name), *lines]))


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
    from trainer.records.event_file import EventFile

    print_above_bar(show(study, folder))
    results.write_csv(folder, study.records())
    picture = ""
    with contextlib.suppress(WrongUse):  # there is nothing to draw
        show(study, folder, figure=folder / "results.png")
        picture = ", results.png"
        with contextlib.closing(EventFile(folder)) as file:
            file.picture("sweep", (folder / "results.png").read_bytes())
    # Trials of a script have no TensorBoard files.
    is_task = not isinstance(study.sweep.config, Script)
    view = f"; to view all trials: {tensorboard(folder)}" if is_task else ""
    print_above_bar(f"files      {folder}/results.csv{picture}{view}")


def _wait_for(folder: Path, stop: StopRequest) -> None:
    """Wait until another machine has started the sweep.

    Raises:
        Stopped: a signal requests a stop.
        NetworkFailure: no machine has started the sweep in time.
    """
    deadline = time.monotonic() + _JOIN_S
    reported = False
    while True:
        if is_sweep(folder):
            with contextlib.suppress(WrongUse):
                open_study(folder, None)
                return
        if stop:
            raise Stopped(f"stopped by {stop.cause} before the sweep: repeat the command")
        if time.monotonic() > deadline:
            raise NetworkFailure(
                f"--worker: no machine started the sweep {folder} within {_JOIN_S:.0f} s: start "
                "it without --worker on one machine"
            )
        if not reported:
            print_above_bar(f"waiting for another machine to start {folder}")
            reported = True
        time.sleep(POLL_S)
