"""The verb `sweep`, and its form for a user's own script."""

from collections.abc import Callable
from typing import Any

import click

from entrypoint.cli.checking import checked_plan
from entrypoint.cli.experiment import Launch
from entrypoint.cli.help_pages import show_help
from entrypoint.cli.launching import supervised
from entrypoint.cli.options import PASS_ON, Option, device_options
from entrypoint.driver.gpus import Gpu
from entrypoint.launch.plan import LaunchPlan, plan_sweep
from entrypoint.launch.request import LaunchRequest
from entrypoint.launch.supervise import SCRIPT_SWEEP
from entrypoint.system.forks import become


def _sweep_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--help-all", "wants_all_help", is_flag=True, help="Show all options."),
        click.option("--help", "-h", "wants_help", is_flag=True, help="Show the everyday options."),
        click.option(
            "--per-gpu",
            cls=Option,
            type=click.IntRange(1),
            default=1,
            metavar="K",
            help="Trials that share a GPU. Default: 1.",
        ),
    ):
        command = option(command)
    return device_options(command)


@click.command(cls=Launch, context_settings=PASS_ON, options_metavar="[OPTIONS]")
@_sweep_options
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="TASK")
def sweep(
    arguments: tuple[str, ...], per_gpu: int, wants_help: bool, wants_all_help: bool, **options: Any
) -> None:
    """Train TASK for each combination of settings and each seed, on all GPUs or on N CPU slots
    (--processes N).

    `trainbox sweep show NAME` prints the results so far, and `trainbox sweep run SCRIPT` runs your
    own script.

    \b
    Examples:
      trainbox sweep digits --seeds 20 --grid width=8,16,32 --grid lr=1e-3,3e-3
      trainbox sweep my.py:Gestures --sampler tpe --trials 50 --range lr=1e-4:1e-1:log
      trainbox sweep mnist --seeds 100 --per-gpu 4 --name course
      trainbox sweep mnist --seeds 100 --name course --worker    on a second machine
      trainbox sweep run train.py --seeds 20 -- --seed {seed} --out {run}
      trainbox sweep show course --csv
    """
    if arguments[:1] == ("show",):
        wanted = ["--help"] if wants_help or wants_all_help else []
        become("trainer", "sweep-show", *arguments[1:], *wanted)
    if wants_help or wants_all_help:
        show_help(click.get_current_context(), "sweep", wants_all_help)
    supervised(*checked_plan(arguments, options, "sweep", _planned(per_gpu)))


class _Templated(click.Command):
    """A command whose arguments after `--` belong to a user's script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta["template"] = tuple(args[end:])
        return super().parse_args(ctx, args[:end])


@click.command("sweep run", cls=_Templated, context_settings=PASS_ON, options_metavar="[OPTIONS]")
@_sweep_options
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT -- ARGS")
def sweep_run(
    arguments: tuple[str, ...], per_gpu: int, wants_help: bool, wants_all_help: bool, **options: Any
) -> None:
    """Run your own SCRIPT for each combination of values and each seed, each trial as one process
    on one GPU or CPU slot.

    In ARGS, {lr} stands for a value of --grid lr=... or --range lr=..., {seed} for the seed, and
    {run} for the trial's folder. The script reports by lines such as {"step": 100, "accuracy": 0.9}
    on standard output, or in metrics.jsonl in its folder TRAINBOX_RUN.

    \b
    Examples:
      trainbox sweep run train.py --seeds 20 -- --seed {seed} --out {run}
      trainbox sweep run train.py --grid lr=1e-3,3e-3 --metric max:accuracy -- --lr {lr}
      trainbox sweep run train.py --sampler tpe --trials 50 --range lr=1e-4:1e-1:log \\
        --metric min:loss -- --lr {lr} --out {run}
    """
    ctx = click.get_current_context()
    if wants_help or wants_all_help:
        show_help(ctx, "sweep-run", wants_all_help)
    training = (*arguments, *ctx.meta["template"])
    supervised(*checked_plan(training, options, "sweep-run", _planned(per_gpu)), kind=SCRIPT_SWEEP)


def _planned(per_gpu: int) -> Callable[[LaunchRequest, tuple[Gpu, ...]], LaunchPlan]:
    return lambda request, gpus: plan_sweep(request, gpus, per_gpu)
