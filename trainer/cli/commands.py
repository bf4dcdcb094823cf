"""The commands of `python -m trainer`, whose options the launcher has parsed and checked."""

import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from trainbox.commands.command_page import PAGE, TEMPLATE, Templated, failure_of
from trainbox.disclosure.suggested_commands import nearest
from trainbox.errors import ExitCode, Failure, WrongUse, called_exit
from trainbox.folders.record_folder import CONFIG, is_sweep
from trainbox.folders.write_failures import show as show_text
from trainbox.folders.write_failures import writing
from trainbox.options.table import COMMANDS, DEVICE, Argument, config_of
from trainbox.processes.environment import launch_facts
from trainbox.task_names.field_texts import field_texts
from trainer.system.report import report_failure
from trainer.system.signals import StopRequest

# Commands that continue without a reader of their output.
_LONG = ("evaluate", "sweep", "sweep-run", "train", "verify")
# The launch plan has the device of a command whose option is the launcher's.
_DEVICE = dataclasses.replace(
    DEVICE, default=lambda: launch_facts(os.environ).device, variables=()
).click()


@click.group(context_settings=PAGE)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train a task on the devices of this process. `trainbox` plans and starts this command."""
    if ctx.invoked_subcommand in _LONG:
        ctx.obj()


def _command(name: str, cls: type[click.Command] = click.Command) -> Callable[..., Any]:
    """Return a decorator for the command `name` of the table, without the launcher's options."""
    rows = COMMANDS[name]
    own = [row for row in rows if isinstance(row, Argument) or row.of_trainer]
    parameters: list[click.Parameter] = [row.click(with_variables=False) for row in own]
    if DEVICE in rows:
        parameters.append(_DEVICE)
    return cli.command(name.replace(" ", "-"), cls, params=parameters)


@_command("train")
def train(
    task: str,
    pairs: tuple[str, ...],
    runs_dir: Path,
    run: str | None,
    data_dir: Path,
    resume: str,
    device: str,
    profile: int | None,
    measure_seconds: float | None,
    hang_minutes: float | None,
    rehearsal: bool,
    **settings: Any,
) -> None:
    """Train TASK: a built-in name, file.py:Class or module:Class."""
    requested = config_of({"task": task, **settings}, field_texts(pairs))
    stop = StopRequest.install(ends_at_once=True)
    if profile is not None:
        # The library of torch's profiler reads this when it is loaded, and prints its phases else.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from trainer.session.train import train_task

    train_task(
        requested,
        stop,
        device,
        runs_dir,
        run,
        data_dir,
        resume,
        measure_s=measure_seconds,
        profile_steps=profile,
        rehearses=rehearsal,
        hang_minutes=hang_minutes,
    )


@_command("verify")
def verify(run: Path, other: Path | None, steps: int | None, data_dir: Path, device: str) -> None:
    """Repeat RUN and compare the digests, or compare RUN with the run OTHER without training."""
    if other is not None:
        from trainer.records.compare_records import compare_runs

        show_text(compare_runs(run, other))
        return
    stop = StopRequest.install()
    from trainer.session.verify import verify_run

    verify_run(run, steps, stop, device, data_dir)


@_command("evaluate")
def evaluate(**request: Any) -> None:
    """Evaluate a checkpoint of RUN on its validation data or its test data."""
    stop = StopRequest.install()
    from trainer.use.evaluate import EvaluateRequest, evaluate_run

    evaluate_run(EvaluateRequest(**request), stop)


@_command("predict")
def predict(**request: Any) -> None:
    """Predict FILES with a checkpoint of RUN, and write a row for each to standard output."""
    stop = StopRequest.install()
    from trainer.use.predict import PredictRequest, predict_run

    predict_run(PredictRequest(**request), stop)


@_command("export")
def export(**request: Any) -> None:
    """Export the model of RUN as a file that needs no Trainbox, with a card."""
    from trainer.system.signals import interruptible

    with interruptible("the export"):
        from trainer.use.export import ExportRequest, export_run

        export_run(ExportRequest(**request))


@_command("config")
def config(run: Path) -> None:
    """Print the settings of a run as JSON."""
    from trainer.records.run_record import RunRecord, object_in

    if is_sweep(run):
        raise WrongUse(
            f"config {run}: this is a sweep: name one of its trials, such as {run}/trial-00000"
        )
    if object_in(run / CONFIG).get("kind") == "script":
        raise WrongUse(
            f"config {run}: a script has no settings that Trainbox knows: its arguments are in "
            "config.json"
        )
    show_text(RunRecord.open(run).config.to_json(), "")


@_command("tasks")
def tasks(name: str | None, as_json: bool) -> None:
    """List the built-in tasks, or the fields of the task NAME."""
    from trainer.load_task import listing

    show_text(listing(name, as_json))


@_command("compare")
def compare(runs: tuple[Path, ...], figure: Path) -> None:
    """Show what differs between RUNS, and draw their curves."""
    from trainer.use.compare import compare as compared

    show_text(compared(runs, figure))


@_command("bench-figure")
def bench_figure(folder: Path) -> None:
    """Draw bench.svg from the bench.json in FOLDER, as `trainbox bench --out FOLDER` does."""
    from trainer.programs.outputs.bench_figure import draw

    draw(folder)


@_command("sweep")
def sweep(task: str, pairs: tuple[str, ...], data_dir: Path, device: str, **values: Any) -> None:
    """Train TASK once for each combination and seed, each on a GPU of its own."""
    from trainer.sweep.request import of_task
    from trainer.sweep.trial_work import task_work

    requested = of_task(config_of({"task": task, **values}, field_texts(pairs)), device, values)
    stop = StopRequest.install()
    from trainer.sweep.call import run_sweep  # imports Optuna

    run_sweep(requested, task_work(requested, data_dir, values["rehearsal"]), values, stop)


@_command("sweep run", Templated)
def sweep_run(
    script: str | None,
    module: str | None,
    torchrun: bool,
    seed: int,
    metric_regex: str | None,
    on_resume: str | None,
    device: str,
    **values: Any,
) -> None:
    """Run SCRIPT once for each combination and seed, each on a GPU of its own."""
    from trainer.sweep.request import of_script
    from trainer.sweep.script_template import Script
    from trainer.sweep.trial_work import script_work

    template = click.get_current_context().meta[TEMPLATE]
    name = script or module or ""
    what = Script(name, module is not None, template, seed, torchrun, metric_regex, on_resume)
    requested = of_script(what, values)
    stop = StopRequest.install()
    from trainer.sweep.call import run_sweep  # imports Optuna

    run_sweep(requested, script_work(requested, device), values, stop)


@_command("sweep show")
def sweep_show(
    name: str,
    runs_dir: Path,
    metric: str | None,
    as_csv: bool,
    figure: Path | None,
) -> None:
    """Print the results so far of the sweep NAME (its folder, or its name in --runs-dir)."""
    folder = Path(name) if is_sweep(Path(name)) else runs_dir / name
    from trainer.sweep.call import show
    from trainer.sweep.study import open_study

    if as_csv and figure is not None:
        raise WrongUse("--csv and --figure exclude each other: give one of them")
    if not is_sweep(folder):
        sweeps = [other.name for other in folder.parent.glob("*") if is_sweep(other)]
        cure = "give the name of a folder in --runs-dir"
        if sweeps:
            cure = nearest(folder.name, sorted(sweeps))
        raise WrongUse(f"{folder} contains no sweep: {cure}")
    with writing(folder):
        study = open_study(folder, None)
        text = show(study, folder, metric, as_csv, figure)
    show_text(text, "" if as_csv else "\n")


def main(on_long: Callable[[], None] = lambda: None) -> NoReturn:
    """Run the command of this process's arguments, and exit. A long one first calls `on_long`."""
    sys.exit(_run(on_long))


def _run(on_long: Callable[[], None]) -> int:
    """Run the command, report its error, and return the exit code."""
    try:
        return int(cli.main(prog_name="trainbox", standalone_mode=False, obj=on_long) or 0)
    except (click.ClickException, Failure) as error:
        report_failure(failure := failure_of(error))
        return failure.exit_code
    except SystemExit as end:
        import traceback

        *_, (frame, _) = traceback.walk_tb(end.__traceback__)
        # Click exits if standard output was closed.
        if str(frame.f_globals.get("__name__")).startswith("click."):
            raise
        # A task that was only loaded called sys.exit.
        report_failure(failure := called_exit(end))
        return failure.exit_code
    except Exception as error:  # noqa: BLE001 - printed to the rank's own log as well
        # Click reports Ctrl-C as Abort, and an EOFError, for example of a killed loader worker.
        is_abort = isinstance(error, click.Abort)
        cause = error.__cause__ if is_abort else error
        if is_abort and not isinstance(cause, EOFError):
            return 128 + signal.SIGINT
        import traceback

        traceback.print_exception(cause)
        return ExitCode.UNEXPECTED
