"""The commands `sweep` and `sweep show`."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from trainbox.contract.config import Config, check
from trainbox.contract.errors import WrongUse
from trainer.cli.invocation import (
    Verb,
    read_device,
    report_environment,
    task_fields,
    warn_of_overruled_imports,
    without_replaced,
)
from trainer.cli.option_help import help_options
from trainer.cli.options import training_options
from trainer.cli.parameters import make_option
from trainer.cli.sweep_options import SweepOptions, sweep_options
from trainer.sweep import grid
from trainer.sweep.retries import TrialLimits
from trainer.sweep.work import task_work
from trainer.system.signals import StopRequest
from trainer.task_loading.fields import parse_fields, static_fields
from trainer.task_loading.load import load_task, loaded_fields

_CHECKED_TRIALS = 10_000


@click.command(cls=Verb)
@click.argument("task", envvar="TASK", default="digits")
@sweep_options("task", "a field or an option")
@training_options
@help_options("run", "resume")
def sweep(
    task: str,
    pairs: tuple[str, ...],
    chosen: SweepOptions,
    runs_dir: Path,
    run: str | None,
    data_dir: Path,
    resume: str,
    device: str,
    only_check: bool,
    device_on_stdin: bool,
    **settings: Any,
) -> None:
    """Train TASK once for each combination and seed, each on a GPU of its own."""
    device = read_device(device, device_on_stdin)
    if run is not None or resume != "auto":
        raise WrongUse(
            "--run and --resume are for one training: use --name; a sweep always resumes"
        )
    ctx = click.get_current_context()
    fields = _without_swept(ctx, task_fields(task, pairs), chosen)
    config = Config(task=task, fields=fields, **without_replaced(settings))
    check(config, device)
    with _naming_the_file(ctx):
        requested = chosen.sweep_of(config, partial(_values, ctx, task), partial(_range, ctx, task))
    is_grid = requested.sampler == "grid"
    for number in range(min(_CHECKED_TRIALS, requested.total) if is_grid else 0):
        check(requested.trial_config(requested.point(number), config.seed), device)
    if only_check:
        warn_of_overruled_imports(task)
        report_environment()
        return
    stop = StopRequest.install()
    limits = TrialLimits(chosen.retries, chosen.trial_minutes)
    chosen.run(requested, task_work(requested, data_dir), runs_dir, limits, stop)


class _Show(Verb):
    """A command that the user types as `trainbox sweep show`."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage("trainbox sweep show", " ".join(self.collect_usage_pieces(ctx)))


@click.command("sweep-show", cls=_Show)
@click.argument("name")
@make_option(
    "--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), help="Default: runs."
)
@make_option("--storage", metavar="URL", help="The study's database, if it has one.")
@click.option(
    "--metric",
    metavar="NAME",
    help="Default: the metric that ranks the sweep's trials, or the first of the trials.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print all trials and metrics as CSV.")
@click.option(
    "--figure",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a figure to this file instead: .png, .svg or .pdf.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a web page with table, charts and learning curves to this file instead.",
)
def sweep_show(
    name: str,
    runs_dir: Path,
    storage: str | None,
    metric: str | None,
    as_csv: bool,
    figure: Path | None,
    html: Path | None,
) -> None:
    """Print the results so far of the sweep NAME (its folder, or its name in --runs-dir).

    \b
    Examples:
      trainbox sweep show digits-sweep-7d2c1a90
      trainbox sweep show digits-sweep-7d2c1a90 --csv > trials.csv
      trainbox sweep show digits-sweep-7d2c1a90 --metric macro_f1 --figure sweep.png
      trainbox sweep show digits-sweep-7d2c1a90 --html sweep.html
    """
    folder = Path(name) if (Path(name) / "study.journal").is_file() else runs_dir / name
    from trainer.sweep.session import show

    if sum([as_csv, figure is not None, html is not None]) > 1:
        raise WrongUse("--csv, --figure and --html exclude each other: give one of them")
    click.echo(show(folder, storage, metric, as_csv, figure, html), nl=not as_csv)


@contextlib.contextmanager
def _naming_the_file(ctx: click.Context) -> Iterator[None]:
    """Put the experiment's file in front of an error in the grid or the ranges that it has.

    Raises:
        WrongUse: the body raises an error of the user.
    """
    from_file = click.core.ParameterSource.DEFAULT_MAP
    try:
        yield
    except WrongUse as error:
        sources = {ctx.get_parameter_source(name) for name in ("grids", "ranges")}
        if "experiment" not in ctx.meta or from_file not in sources:
            raise
        raise WrongUse(f"{ctx.meta['experiment']}: [sweep] {error}") from error


def _without_swept(
    ctx: click.Context, fields: dict[str, Any], chosen: SweepOptions
) -> dict[str, Any]:
    """Return the fields without those of an experiment's file that the sweep varies."""
    from_file = ctx.meta.get("written", {})
    swept = {text.partition("=")[0] for text in (*chosen.grids, *chosen.ranges)}
    return {
        name: value for name, value in fields.items() if not (name in swept and name in from_file)
    }


def _values(ctx: click.Context, task: str, text: str) -> tuple[str, list[grid.Value]]:
    """Return the name and the values of a --grid."""
    written, texts = grid.parse_grid(text)
    name, values = _converted(ctx, task, f"--grid {text}", written, texts)
    return name, grid.choices(text, values)


def _range(ctx: click.Context, task: str, text: str) -> tuple[str, grid.Range]:
    """Return the name and the range of a --range, of whole numbers if the setting is one."""
    written, low, high, log = grid.parse_range(text)
    name, ends = _converted(ctx, task, f"--range {text}", written, [low, high])
    return name, grid.between(text, ends[0], ends[1], log)


def _converted(
    ctx: click.Context, task: str, given: str, written: str, texts: Sequence[str]
) -> tuple[str, list[grid.Value]]:
    """Return the name of a field or of a setting (`lr` is learning_rate), and its values.

    The values are checked as those of --set and of the options are.

    Raises:
        WrongUse: The name is unknown, a value is not valid, or the option cannot be swept.
    """
    fields = static_fields(task)
    if fields is None:
        fields = loaded_fields(type(load_task(task, {})))
    flag = f"--{written.replace('_', '-')}"
    option = next(
        (p for p in ctx.command.params if flag in p.opts and p.name and grid.is_setting(p.name)),
        None,
    )
    if any(field.name == written for field in fields):
        if grid.is_setting(written):
            raise WrongUse(
                f"{given}: the field {written} of task {task} has the name of an option: "
                "give the field another name"
            )
        option = None
    if option is None or option.name is None:
        optional = [dataclasses.replace(field, default=None) for field in fields]
        shown = {written: given}
        return written, [
            parse_fields(task, optional, {written: text}, shown)[written] for text in texts
        ]
    if getattr(option, "is_flag", False):
        raise WrongUse(f"{given}: {flag} is a switch without values: choose another option")
    if option.multiple:
        raise WrongUse(f"{given}: {flag} can be repeated, so it cannot be swept: use {flag} alone")
    if ctx.get_parameter_source(option.name) is click.core.ParameterSource.COMMANDLINE:
        raise WrongUse(f"{given}: {flag} is also given: drop one of the two")
    try:
        return option.name, [option.type_cast_value(ctx, text) for text in texts]
    except click.BadParameter as error:
        raise WrongUse(f"{given}: {error.message.rstrip('.')}") from error
