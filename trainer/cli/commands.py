"""The trainer's command line: checks everything it can before torch is imported."""

import dataclasses
import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from trainer.errors import MESSAGES, Failure, WrongUse, called_exit
from trainer.parallel.strategy import STRATEGIES
from trainer.settings.config import Config, check, load_config_file
from trainer.settings.environment import PREFIX, check_names
from trainer.settings.optimizers import OPTIMIZERS
from trainer.settings.task_source import overruled
from trainer.sweep import grid
from trainer.system.signals import StopRequest
from trainer.system.streams import message
from trainer.task import (
    built_in_tasks,
    load_task,
    loaded_fields,
    locate,
    parse_fields,
    static_fields,
    summary,
)


class _Number(click.ParamType[float]):
    """A finite number above (or from) `low`; click's ranges let NaN through."""

    name = "number"

    def __init__(self, low: float, open_low: bool = True, high: float = math.inf) -> None:
        self.low, self.open_low, self.high = low, open_low, high

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is not a number", param, ctx)
        if not math.isfinite(number) or number < self.low or (self.open_low and number == self.low):
            self.fail(
                f"{value} is not a finite number {'above' if self.open_low else 'from'} "
                f"{self.low:g}",
                param,
                ctx,
            )
        if number > self.high:
            self.fail(f"{value} is more than {self.high:g}", param, ctx)
        return number


class _Whole(click.ParamType[int]):
    """A whole number from `low` to `high`, which floating point can still count with."""

    name = "whole number"

    def __init__(self, low: int, high: int = 2**53) -> None:
        self.low, self.high = low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)
        if not self.low <= number <= self.high:
            self.fail(f"{value} is not a whole number from {self.low} to {self.high}", param, ctx)
        return number


_COUNT = _Whole(1)
_CHECKED_TRIALS = 10_000
_PAGE = {"help_option_names": ["--help", "-h"], "max_content_width": 110}


def _read_config_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    if path is not None:
        settings = load_config_file(path)
        ctx.meta["fields"] = settings.pop("fields", {})
        # As text, so that a value means here what it means on the command line: 1.5 is no number of
        # epochs.
        ctx.default_map = {
            name: str(value) for name, value in settings.items() if value is not None
        }


def _option(*names: str, **attributes: Any) -> Any:
    """An option with its environment name: `--batch-size` is TRAINBOX_BATCH_SIZE."""
    variable = PREFIX + names[0].split("/")[0].lstrip("-").replace("-", "_").upper()
    return click.option(*names, envvar=[*attributes.pop("also", []), variable], **attributes)


_OPTIONS = [
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        envvar="TRAINBOX_CONFIG",
        is_eager=True,
        expose_value=False,
        callback=_read_config_file,
        help="JSON file of settings, such as a run's config.json; options given beside it win.",
    ),
    _option(
        "--set",
        "pairs",
        multiple=True,
        metavar="NAME=VALUE",
        also=["SET"],
        help="A field of the task; repeatable.",
    ),
    _option(
        "--epochs",
        type=_COUNT,
        metavar="N",
        help="Passes over the training set. Default: the task's.",
    ),
    _option("--max-steps", type=_COUNT, metavar="N", help="Optimizer steps, instead of --epochs."),
    _option(
        "--batch-size",
        type=_COUNT,
        metavar="N",
        help="Examples per optimizer step, over all GPUs. Default: the task's.",
    ),
    _option("--batch-size-per-gpu", type=_COUNT, metavar="N", help="The same, for each process."),
    _option(
        "--accumulation",
        type=_COUNT,
        metavar="N",
        help="Parts a GPU's share of a batch is computed in. Default: 1, and more if the first "
        "steps do not fit.",
    ),
    _option(
        "--shards",
        type=_COUNT,
        metavar="V",
        help="Parts of a batch: the same bits on 1 to V processes. Default: the processes of "
        "the run's first start.",
    ),
    _option(
        "--threads",
        type=_Whole(1, 1024),
        metavar="N",
        help="CPU threads a process; they change bits, so they stay with the run. Default: its "
        "share of the CPUs.",
    ),
    _option(
        "--lr", "learning_rate", type=_Number(0), help="Peak learning rate. Default: the task's."
    ),
    _option(
        "--lr-scaling",
        type=click.Choice(["none", "linear", "sqrt"]),
        default="none",
        help="Of --lr with the batch size.",
    ),
    _option(
        "--base-batch-size",
        type=_COUNT,
        metavar="N",
        default=256,
        help="The batch size --lr is meant for. Default: 256.",
    ),
    _option(
        "--warmup-epochs",
        type=_Number(0, open_low=False, high=1e9),
        default=0.0,
        help="Linear warm-up. Default: 0.",
    ),
    _option(
        "--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", help="Default: adamw."
    ),
    _option("--weight-decay", type=_Number(0, open_low=False), help="Default: the optimizer's."),
    _option("--clip-norm", type=_Number(0), help="Largest gradient norm. Default: no limit."),
    _option(
        "--skip-nonfinite",
        type=_Whole(0),
        metavar="N",
        default=0,
        help="Leave out up to N steps in a row whose gradient is not finite. Default: 0, which "
        "ends at the first.",
    ),
    _option(
        "--precision",
        type=click.Choice(["fp32", "tf32", "bf16", "fp16"]),
        help="Default: bf16 on Ampere or newer, fp16 on older GPUs, fp32 elsewhere.",
    ),
    _option(
        "--eval-every",
        type=_COUNT,
        metavar="N",
        default=1,
        help="Epochs between validations. Default: 1.",
    ),
    _option(
        "--best-by",
        metavar="METRIC",
        help="Metric of the best checkpoint: accuracy, min:loss. Default: the task's.",
    ),
    _option(
        "--early-stopping", metavar="METRIC", help="End when this metric stops getting better."
    ),
    _option(
        "--patience",
        type=_COUNT,
        metavar="N",
        default=5,
        help="Validations to wait for it. Default: 5.",
    ),
    _option(
        "--checkpoint-steps",
        type=_COUNT,
        metavar="N",
        help="Steps between checkpoints, beside the best, the last and the minutes.",
    ),
    _option(
        "--checkpoint-minutes",
        type=_Number(0),
        default=5.0,
        help="Minutes between checkpoints. Default: 5.",
    ),
    _option(
        "--keep",
        type=_COUNT,
        metavar="N",
        default=3,
        help="Newest checkpoints kept, beside the best. Default: 3.",
    ),
    _option(
        "--log-steps",
        type=_COUNT,
        metavar="N",
        default=50,
        help="Steps between entries in metrics.jsonl. Default: 50.",
    ),
    _option(
        "--digest-steps",
        type=_COUNT,
        metavar="N",
        help="Steps between entries in digests.jsonl. Default: an epoch.",
    ),
    _option(
        "--workers",
        type=_Whole(0, 1024),
        metavar="N",
        help="Loader processes for data not held in memory, a process.",
    ),
    _option("--seed", type=_Whole(0, 2**63 - 1), metavar="N", default=0, help="Default: 0."),
    _option(
        "--deterministic/--fast",
        default=True,
        help="Same bits each time (default), or whatever is fastest.",
    ),
    _option(
        "--compile/--no-compile", default=False, help="torch.compile the model; needs a C compiler."
    ),
    _option(
        "--runs-dir",
        type=click.Path(readable=False, path_type=Path),
        default=Path("runs"),
        help="Default: runs.",
    ),
    _option(
        "--run",
        metavar="NAME",
        help="The run's folder there. Default: the task and a digest of the settings.",
    ),
    _option(
        "--data-dir",
        type=click.Path(path_type=Path),
        default=Path("data"),
        help="Where datasets lie. Default: data.",
    ),
    _option(
        "--resume",
        type=click.Choice(["auto", "never", "anyway"]),
        default="auto",
        help="auto: go on from the run's newest checkpoint. never: refuse a run that has one. "
        "anyway: go on though the "
        "software, the hardware, the data or the task changed.",
    ),
]


def _training_options(command: Any) -> Any:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _print_options(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """The options alone, for the page that `trainbox train --help` makes."""
    if value:
        formatter = ctx.make_formatter()
        with formatter.section(
            "Training options, each also as TRAINBOX_NAME in the environment (--epochs: "
            "TRAINBOX_EPOCHS)"
        ):
            options = [
                p for p in ctx.command.params if isinstance(p, click.Option) and p.name != "device"
            ]
            formatter.write_dl(
                [record for option in options if (record := option.get_help_record(ctx))]
            )
        click.echo(formatter.getvalue().rstrip())
        ctx.exit()


class _Verb(click.Command):
    """A verb that refuses misspelt names in the environment; `--help` works whatever they are."""

    def invoke(self, ctx: click.Context) -> Any:
        check_names(
            os.environ,
            {
                name
                for command in cli.commands.values()
                for p in command.params
                for name in _variables(p)
            },
        )
        return super().invoke(ctx)


class _Verbs(click.Group):
    command_class = _Verb


def _variables(param: click.Parameter) -> Sequence[str]:
    """The names by which the environment can set it."""
    return [param.envvar] if isinstance(param.envvar, str) else param.envvar or []


def _report_environment() -> None:
    """Print the names that have set something, for the launcher, which decides the device and shows
    all of them to the user.
    """
    ctx = click.get_current_context()
    names = [
        next(name for name in _variables(param) if os.environ.get(name))
        for param in ctx.command.params
        if param.name
        and ctx.get_parameter_source(param.name) is click.core.ParameterSource.ENVIRONMENT
    ]
    click.echo()  # ends a line that a task may have begun
    click.echo(" ".join(name for name in names if name != "TRAINBOX_DEVICE"))


@click.group(cls=_Verbs, context_settings=_PAGE)
def cli() -> None:
    """Train a task on the devices that this process was given. `trainbox` plans and starts this."""


@cli.command()
@click.argument("task", envvar="TASK", default="digits")
@_training_options
@_option(
    "--device",
    type=click.Choice(["auto", "cuda", "mps", "cpu"]),
    default="auto",
    help="Default: auto.",
)
@click.option("--check", "only_check", is_flag=True, hidden=True)
@click.option(
    "--device-on-stdin",
    is_flag=True,
    hidden=True,
    help="And the strategy: the launcher decides them meanwhile.",
)
@click.option(
    "--measure-seconds",
    type=_Number(0),
    hidden=True,
    help="For `trainbox bench`: measure, then end.",
)
@click.option(
    "--help-options",
    is_flag=True,
    hidden=True,
    is_eager=True,
    expose_value=False,
    callback=_print_options,
)
def train(
    task: str,
    pairs: tuple[str, ...],
    runs_dir: Path,
    run: str | None,
    data_dir: Path,
    resume: str,
    device: str,
    only_check: bool,
    device_on_stdin: bool,
    measure_seconds: float | None,
    **settings: Any,
) -> None:
    """Train TASK: a built-in name, file.py:Class or module:Class.

    \b
    Examples:
      trainbox train digits --epochs 5 --device cpu
      trainbox train my.py:Gestures --set width=64
    """
    if device_on_stdin:
        device = sys.stdin.readline().strip() or device
    config = Config(task=task, fields=_fields(task, pairs), **_overridden(settings))
    check(config, device)
    if device_on_stdin and (strategy := sys.stdin.readline().strip()):
        STRATEGIES[strategy].check(config)
    _check_run_name(run)
    if config.compile and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise WrongUse(
            "--compile needs a C compiler, and there is none on PATH: install one, or "
            "drop --compile"
        )
    if only_check:
        _warn_of_overruled_imports(task)
        _report_environment()
        return
    stop = StopRequest.install()
    from trainer.session import train_task

    train_task(config, stop, device, runs_dir, run, data_dir, resume, measure_s=measure_seconds)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("other", required=False, type=click.Path(path_type=Path))
@click.option(
    "--steps", type=_COUNT, metavar="N", help="Repeat the first N steps. Default: the whole run."
)
@_option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=Path("data"),
    help="Where datasets lie. Default: data.",
)
@_option(
    "--device",
    type=click.Choice(["auto", "cuda", "mps", "cpu"]),
    default="auto",
    help="Default: auto.",
)
@click.option("--check", "only_check", is_flag=True, hidden=True)
@click.option("--device-on-stdin", is_flag=True, hidden=True)
def verify(
    run: Path,
    other: Path | None,
    steps: int | None,
    data_dir: Path,
    device: str,
    only_check: bool,
    device_on_stdin: bool,
) -> None:
    """Repeat RUN and compare the digests, or compare RUN with the run OTHER without training.

    If they differ, the exit code is 8, and the message names the first step and tensor.

    \b
    Examples:
      trainbox verify runs/digits-7d2c1a90
      trainbox verify runs/digits-7d2c1a90 --steps 100
      trainbox verify runs/digits-7d2c1a90 runs/digits-7d2c1a90-replay
    """
    if other is not None:
        _compare(run, other)
        return
    if device_on_stdin:
        device = sys.stdin.readline().strip() or device
    for name in ("config.json", "manifest.json", "digests.jsonl"):
        if not (run / name).is_file():
            raise WrongUse(
                f"verify {run}: no {name} there: give the folder of a run, such as "
                "runs/digits-7d2c1a90"
            )
    if only_check:
        _report_environment()
        return
    stop = StopRequest.install()
    from trainer.session import verify_run

    verify_run(run, steps, stop, device, data_dir)


def _compare(one: Path, other: Path) -> None:
    """Print that two runs have the same bits, with their differences in settings.

    Raises:
        WrongUse: a folder is not a run, or both are the same folder.
        Differs: the digests differ, or a run's files contradict each other.
    """
    from trainer.records.compare import (  # their patterns take milliseconds to compile
        in_words,
        manifest_differences,
    )
    from trainer.records.evidence import Evidence, verdict

    for run in (one, other):
        for name in ("digests.jsonl", "manifest.json"):
            if not (run / name).is_file():
                raise WrongUse(f"verify {run}: no {name} there: give the folders of two runs")
    if one.samefile(other):
        raise WrongUse(
            f"verify {one} {other}: both are the same folder: give the folders of two runs"
        )
    runs = [Evidence.of(run) for run in (one, other)]
    from trainer.records.shipped import check_files

    a, b = (check_files(run) for run in runs)
    same = verdict(a, b, in_words(manifest_differences(a.manifest, b.manifest)))
    # Entries have a time: equal files are copies, not two trainings.
    copied = bool(a.metrics) and a.metrics == b.metrics
    note = f"; {other} is a copy of {one}: this is one training, compared with itself"
    click.echo(same + (note if copied else ""))


def _overridden(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without those of the --config file that an option replaces.

    --max-steps replaces the file's epochs, and --batch-size-per-gpu its batch size, and vice versa.
    """
    ctx = click.get_current_context()
    source, from_file = ctx.get_parameter_source, click.core.ParameterSource.DEFAULT_MAP
    for one, other in (("epochs", "max_steps"), ("batch_size", "batch_size_per_gpu")):
        for kept, dropped in ((one, other), (other, one)):
            if (
                settings[kept] is not None
                and source(kept) != from_file
                and source(dropped) == from_file
            ):
                settings = settings | {dropped: None}
    return settings


def _fields(task: str, pairs: tuple[str, ...]) -> dict[str, Any]:
    """The task's fields from --config and --set, checked against its source where that can be
    read.
    """
    given = dict(click.get_current_context().meta.get("fields", {}))
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise WrongUse(f"--set {pair}: write NAME=VALUE, as in --set width=64")
        given[name] = value
    fields = static_fields(task)
    return given if fields is None else parse_fields(task, fields, given)


def _warn_of_overruled_imports(task: str) -> None:
    """Say it once, in the launcher's check, and not in each rank."""
    place, _ = locate(task)
    for line in overruled(place):
        click.echo(message(line), err=True)


def _check_run_name(run: str | None, option: str = "--run") -> None:
    if run is not None and (
        run != Path(run).name
        or run.startswith(".")
        or not run.isprintable()
        or len(os.fsencode(run)) > 255
    ):
        raise WrongUse(
            f"{option} {run!r} is not a folder's name: letters and digits; the place is --runs-dir"
        )


_SWEEP_OPTIONS = [
    _option(
        "--seeds",
        type=_COUNT,
        metavar="N",
        default=1,
        help="Trials of each combination, with seeds from --seed on.",
    ),
    _option(
        "--grid",
        "grids",
        multiple=True,
        metavar="NAME=A,B,C",
        help="Values of a field or an option; repeatable.",
    ),
    _option(
        "--range",
        "ranges",
        multiple=True,
        metavar="NAME=LOW:HIGH[:log]",
        help="For a sampler to draw from.",
    ),
    _option(
        "--sampler",
        type=click.Choice(["grid", "random", "tpe"]),
        default="grid",
        help="Default: grid, all of it.",
    ),
    _option("--trials", type=_COUNT, metavar="N", help="How many a sampler draws."),
    _option("--metric", metavar="METRIC", help="What trials are compared by: accuracy, min:loss."),
    _option(
        "--pruner",
        type=click.Choice(["none", "median"]),
        default="none",
        help="Leave off trials worse than the median.",
    ),
    _option(
        "--retries",
        type=_Whole(0),
        metavar="N",
        default=1,
        help="Of a trial that failed, on another GPU. Default: 1.",
    ),
    _option(
        "--retry-failed", is_flag=True, help="Train those that have failed for good once more."
    ),
    _option(
        "--trial-minutes",
        type=_Number(0),
        metavar="N",
        help="End a trial that takes longer: a failure. Default: none.",
    ),
    _option(
        "--name",
        metavar="NAME",
        help="The sweep's folder in --runs-dir. Default: the task and a digest.",
    ),
    _option(
        "--storage",
        metavar="URL",
        help="A database for the study. Default: a journal in the sweep's folder.",
    ),
    _option(
        "--worker",
        is_flag=True,
        help="Join the sweep that another machine begins; wait for it, and print no table.",
    ),
]


def _sweep_options(command: Any) -> Any:
    for option in reversed(_SWEEP_OPTIONS):
        command = option(command)
    return command


@cli.command()
@click.argument("task", envvar="TASK", default="digits")
@_sweep_options
@_training_options
@_option(
    "--device",
    type=click.Choice(["auto", "cuda", "mps", "cpu"]),
    default="auto",
    help="Default: auto.",
)
@click.option("--check", "only_check", is_flag=True, hidden=True)
@click.option(
    "--device-on-stdin",
    is_flag=True,
    hidden=True,
    help="For the launcher, which decides it meanwhile.",
)
@click.option(
    "--help-options",
    is_flag=True,
    hidden=True,
    is_eager=True,
    expose_value=False,
    callback=_print_options,
)
def sweep(
    task: str,
    pairs: tuple[str, ...],
    grids: tuple[str, ...],
    ranges: tuple[str, ...],
    seeds: int,
    sampler: str,
    trials: int | None,
    metric: str | None,
    pruner: str,
    retries: int,
    retry_failed: bool,
    trial_minutes: float | None,
    name: str | None,
    storage: str | None,
    worker: bool,
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
    if device_on_stdin:
        device = sys.stdin.readline().strip() or device
    if run is not None or resume != "auto":
        raise WrongUse(
            "--run and --resume are for one training: a sweep has --name, and always goes on"
        )
    config = Config(task=task, fields=_fields(task, pairs), **_overridden(settings))
    check(config, device)
    _check_run_name(name, "--name")
    ctx = click.get_current_context()
    asked = grid.Sweep(
        config,
        _once("--grid", [_values(ctx, task, text) for text in grids], config),
        _once("--range", [_range(ctx, task, text) for text in ranges], config),
        seeds,
        sampler,
        trials,
        metric,
        pruner,
    )
    grid.check(asked)
    for number in range(min(_CHECKED_TRIALS, asked.total) if sampler == "grid" else 0):
        check(asked.trial_config(asked.point(number), config.seed), device)
    if only_check:
        _warn_of_overruled_imports(task)
        _report_environment()
        return
    stop = StopRequest.install()
    from trainer.sweep.runner import Limits, run_sweep

    run_sweep(
        asked,
        runs_dir,
        name,
        storage,
        data_dir,
        Limits(retries, trial_minutes),
        retry_failed,
        worker,
        stop,
    )


@cli.command("bench-figure")
@click.argument("folder", type=click.Path(path_type=Path))
def bench_figure(folder: Path) -> None:
    """Draw bench.svg from the bench.json in FOLDER, as `trainbox bench --out FOLDER` does."""
    from trainer.cli.bench_figure import draw

    draw(folder)


class _Show(_Verb):
    """Typed as `trainbox sweep show`, which hands over to this verb."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage("trainbox sweep show", " ".join(self.collect_usage_pieces(ctx)))


@cli.command("sweep-show", cls=_Show)
@click.argument("name")
@_option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), help="Default: runs.")
@_option("--storage", metavar="URL", help="The study's database, if it has one.")
@click.option(
    "--metric",
    metavar="NAME",
    help="Default: the one that the sweep compares by, or the trials' first.",
)
@click.option("--csv", "as_csv", is_flag=True, help="All trials as CSV, with all their metrics.")
@click.option(
    "--figure",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw into this file instead: .png, .svg, .pdf.",
)
def sweep_show(
    name: str,
    runs_dir: Path,
    storage: str | None,
    metric: str | None,
    as_csv: bool,
    figure: Path | None,
) -> None:
    """Print what came out of the sweep NAME (its folder, or its name in --runs-dir) up to now.

    \b
    Examples:
      trainbox sweep show digits-sweep-7d2c1a90
      trainbox sweep show digits-sweep-7d2c1a90 --csv > trials.csv
      trainbox sweep show digits-sweep-7d2c1a90 --metric macro_f1 --figure sweep.png
    """
    folder = Path(name) if (Path(name) / "study.journal").is_file() else runs_dir / name
    from trainer.sweep.runner import show

    click.echo(show(folder, storage, metric, as_csv, figure), nl=not as_csv)


def _values(ctx: click.Context, task: str, text: str) -> tuple[str, list[grid.Value]]:
    """(name, values) of a --grid."""
    written, texts = grid.parse_grid(text)
    name, values = _converted(ctx, task, f"--grid {text}", written, texts)
    return name, grid.choices(text, values)


def _range(ctx: click.Context, task: str, text: str) -> tuple[str, grid.Range]:
    """(name, range) of a --range; whole numbers where the setting is one."""
    written, low, high, log = grid.parse_range(text)
    name, ends = _converted(ctx, task, f"--range {text}", written, [low, high])
    return name, grid.between(text, ends[0], ends[1], log)


def _converted(
    ctx: click.Context, task: str, given: str, written: str, texts: Sequence[str]
) -> tuple[str, list[grid.Value]]:
    """The name of a field or of a setting (`lr` is learning_rate), and its values, checked as --set
    and the options are.
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
                f"{given}: task {task} has a field of the name of an option, {written}: "
                "give the field another name"
            )
        option = None
    if option is None or option.name is None:
        optional = [dataclasses.replace(field, default=None) for field in fields]
        return written, [parse_fields(task, optional, {written: text})[written] for text in texts]
    if getattr(option, "is_flag", False):
        raise WrongUse(f"{given}: {flag} is a switch; a sweep needs values")
    if ctx.get_parameter_source(option.name) is click.core.ParameterSource.COMMANDLINE:
        raise WrongUse(f"{given}: {flag} is given a value of its own as well: drop one")
    return option.name, [option.type_cast_value(ctx, text) for text in texts]


_T = TypeVar("_T")


def _once(option: str, named: Sequence[tuple[str, _T]], config: Config) -> dict[str, _T]:
    """By name; each once, and none that --set gives as well."""
    for number, (name, _) in enumerate(named):
        if name in dict(named[:number]) or name in config.fields:
            raise WrongUse(f"{option} {name}=...: {name} is given twice: drop one")
    return dict(named)


@cli.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def tasks(name: str | None, as_json: bool) -> None:
    """List the tasks, or the fields of the task NAME (also of your own: file.py:Class)."""
    if name is None:
        listing = {task: summary(task) for task in built_in_tasks()}
        lines = [f"{task:<18}{text}" for task, text in listing.items()]
        click.echo(json.dumps(listing) if as_json else "\n".join(lines))
        return
    fields = static_fields(name)
    if fields is None:
        fields = loaded_fields(type(load_task(name, {})))
    values = {f.name: {"type": f.type.__name__, "default": _default(f.default)} for f in fields}
    if as_json:
        click.echo(json.dumps(values, default=str))
        return
    click.echo(f"{name}: {summary(name)}" if ":" not in name else name)
    for field, entry in values.items():
        click.echo(f"  --set {field}=...  {entry['type']}, default {entry['default']}")


def _default(value: Any) -> Any:
    return None if value is dataclasses.MISSING else value


def _tell(error: Failure) -> None:
    """On standard error; a rank leaves it to its launcher, which says once what several have to
    say.
    """
    if folder := os.environ.get(MESSAGES):
        Path(folder, os.environ["RANK"]).write_text(
            str(error), encoding="utf-8", errors="backslashreplace"
        )
    else:
        click.echo(message(str(error)), err=True)


def main() -> NoReturn:
    """`python -m trainer`."""
    sys.exit(_run())


def _run() -> int:
    try:
        return int(cli.main(prog_name="trainbox", standalone_mode=False) or 0)
    except click.ClickException as error:
        click.echo(message(error.format_message()), err=True)
        return WrongUse.exit_code
    except Failure as error:
        _tell(error)
        return error.exit_code
    except SystemExit as end:
        *_, (frame, _) = traceback.walk_tb(end.__traceback__)
        # nobody reads standard output any more
        if str(frame.f_globals.get("__name__")).startswith("click."):
            raise
        # Of a task that was only loaded.
        _tell(failure := called_exit(end))
        return failure.exit_code
    except click.Abort as abort:
        # Click takes the end of any stream for Ctrl-C, as that to a loader worker which was killed.
        is_ctrl_c = not isinstance(abort.__cause__, EOFError)
        if not is_ctrl_c:
            traceback.print_exception(abort.__cause__)
        return 130 if is_ctrl_c else 1
    except Exception:  # noqa: BLE001 - in the rank's own log as well
        traceback.print_exc()
        return 1
