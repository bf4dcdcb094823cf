"""The verbs for several runs: `runs`, `compare` and `clean`."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import click

from entrypoint.cli.verb import verb
from entrypoint.runs.clean import Leftover, leftovers
from entrypoint.runs.read import is_named, stored_runs, with_fault
from entrypoint.runs.table import SORTS, json_of, table
from trainbox.disclosure.suggested_commands import command
from trainbox.errors import StorageFailure, WrongUse
from trainbox.files.entries import plain
from trainbox.folders.lease import Lease
from trainbox.folders.record_folder import MANIFEST
from trainbox.folders.write_failures import disk_is_full, show, writing
from trainbox.processes.streams import message


@verb("runs")
def runs(task: str | None, sort: str, trials: bool, as_json: bool, runs_dir: Path) -> None:
    """List the runs in the folder `runs`: only the settings that differ between them, the best
    metric, the steps, the state, the time since the last write, and the size.

    A sweep is one row, whose steps are its trials.

    \b
    Examples:
      trainbox runs
      trainbox runs --task digits --sort metric
      trainbox runs --task Rings    the runs of my_tasks/rings.py:Rings
      trainbox runs --all --json
    """
    stored = list(stored_runs(runs_dir, trials))
    found = [run for run in stored if task is None or is_named(run.task, task)]
    found.sort(key=SORTS[sort])
    where = with_fault(runs_dir)
    if as_json:
        if where != str(runs_dir):
            message(f"no runs in {where}")
        show(json.dumps(plain([json_of(run) for run in found]), indent=2))
    elif found:
        show(table(found, time.time()))
    else:
        of_task = f" of the task {task}" if task else ""
        tasks = sorted({run.task for run in stored})
        others = f" (it has runs of {', '.join(tasks)})" if tasks else ""
        if where != str(runs_dir) and any(Path().glob(f"*/{MANIFEST}")):
            others = (
                f": the current folder has runs, and `{command('runs', '--runs-dir .')}` lists them"
            )
        show(f"no runs{of_task} in {where}{others}")


@verb("compare")
def compare(**values: Any) -> None:
    """Show what differs between the trainings RUNS in settings, data, software and results, and
    draw their curves in one picture. Of runs of scripts, show the arguments and the last metrics.

    `trainbox verify A B` compares their bits.

    \b
    Examples:
      trainbox compare runs/digits-7d2c runs/digits-3c3a
      trainbox compare runs/digits-* --figure curves.svg
    """
    from entrypoint.cli.launching import become_trainer
    from entrypoint.cli.stored import check_folder, check_run, is_script
    from entrypoint.runs.compare import compare_scripts

    for run in values["runs"]:
        check_folder("compare", run)
    if all(is_script(run) for run in values["runs"]):
        show(compare_scripts(values["runs"]))
        return
    for run in values["runs"]:
        check_run("compare", run)
    become_trainer("compare", values)


@verb("clean")
def clean(yes: bool, runs_dir: Path) -> None:
    """Show what of the runs can go and how much space it takes, and remove it after a question.

    This is what starts that have trained nothing have left, and the checkpoints of complete runs
    but the best and the last one. A running run, a sweep, the run of a script,
    `model.safetensors`, and the last way to resume always stay.

    \b
    Examples:
      trainbox clean          show, and ask on a terminal
      trainbox clean --yes    remove without a question
    """
    found = [
        leftover
        for run in stored_runs(runs_dir, trials=False)
        for leftover in leftovers(run, runs_dir / run.name)
    ]
    if not found:
        show(f"nothing to remove in {with_fault(runs_dir)}")
        return
    sizes = [leftover.bytes for leftover in found]
    for leftover, size in zip(found, sizes, strict=True):
        show(f"{size / 1e6:9,.1f} MB  {runs_dir / leftover.run}: {leftover.what}")
    show(f"{sum(sizes) / 1e6:9,.1f} MB  together")
    if not (yes or (sys.stdin.isatty() and click.confirm("remove them?"))):
        show("nothing was removed: `trainbox clean --yes` removes them")
        return
    failures, removed = [], 0
    for leftover in found:
        try:
            removed += _remove(leftover, runs_dir)
        except StorageFailure as failure:
            failures.append(failure)
    done = "removed" if removed == len(found) else f"{removed} of {len(found)} are removed"
    if failures:
        raise StorageFailure(f"{failures[0]}; {done}")
    show(done)


def _remove(leftover: Leftover, runs_dir: Path) -> bool:
    """Remove the files, and return whether they are: a training may have started in their run."""
    folder = runs_dir / leftover.run
    with writing(folder):
        lease = None
        try:
            lease = Lease(folder)
        except WrongUse:
            show(f"{folder} is in use now: left as it is")
            return False
        except OSError as error:
            # No process has the lease. A training that starts now has no space for one, either.
            if not disk_is_full(error):
                raise
        try:
            for path in leftover.paths:
                if path.is_symlink():
                    path.unlink()
                elif path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        finally:
            if lease is not None:
                lease.release()
    return True
