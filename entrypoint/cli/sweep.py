"""The verb `sweep`."""

from typing import Any

import click

from entrypoint.cli.help_pages import show_help
from entrypoint.cli.launching import checked_plan, hand_over, supervised
from entrypoint.cli.options import PASS_ON, Option, device_options
from entrypoint.launch.plan import plan_sweep


@click.command(
    context_settings=PASS_ON,
    options_metavar="[OPTIONS]",
    short_help="Train a task for each combination of settings and each seed.",
)
@device_options
@click.option(
    "--per-gpu",
    cls=Option,
    type=click.IntRange(1),
    default=1,
    metavar="K",
    help="Trials that share a GPU. Default: 1.",
)
@click.option("--help", "-h", "wants_help", is_flag=True, help="Show the everyday options.")
@click.option("--help-all", "wants_all_help", is_flag=True, help="Show all options.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="TASK")
def sweep(
    arguments: tuple[str, ...], per_gpu: int, wants_help: bool, wants_all_help: bool, **options: Any
) -> None:
    """Train TASK for each combination of settings and each seed, on all GPUs or on N CPU slots
    (--processes N).

    `trainbox sweep show NAME` prints the results so far.

    \b
    Examples:
      trainbox sweep digits --seeds 20 --grid width=8,16,32 --grid lr=1e-3,3e-3
      trainbox sweep my.py:Gestures --sampler tpe --trials 50 --range lr=1e-4:1e-1:log
      trainbox sweep mnist --seeds 100 --per-gpu 4 --name course
      trainbox sweep mnist --seeds 100 --name course --worker    on a second machine
      trainbox sweep show course --csv
    """
    if arguments[:1] == ("show",):
        hand_over(
            "sweep-show", *arguments[1:], *(["--help"] if wants_help or wants_all_help else [])
        )
    if wants_help or wants_all_help:
        show_help(click.get_current_context(), "sweep", wants_all_help)
    supervised(
        *checked_plan(
            arguments, options, "sweep", lambda request, gpus: plan_sweep(request, gpus, per_gpu)
        )
    )
