"""Print the trainer's part of `trainbox COMMAND --help`."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import click

from trainbox.contract import hints
from trainer.cli.parameters import SWEEP, TRAINING, Option


def help_options(*refused: str) -> Callable[[Any], Any]:
    """Add the hidden options that print the trainer's part of `trainbox COMMAND --help`.

    `refused` has the names of training options that the command refuses.
    """

    def add(command: Any) -> Any:
        for name, whole in (("--help-options", False), ("--help-all-options", True)):
            command = click.option(
                name,
                is_flag=True,
                hidden=True,
                is_eager=True,
                expose_value=False,
                callback=partial(_print_options, refused, whole),
            )(command)
        return command

    return add


def _print_options(
    refused: Sequence[str], whole: bool, ctx: click.Context, _param: click.Parameter, value: bool
) -> None:
    if not value:
        return
    formatter = ctx.make_formatter()
    options = [
        param
        for param in ctx.command.params
        if isinstance(param, Option) and param.section and param.name not in refused
    ]
    sections = [option.section for option in options]
    kind = "training" if TRAINING in sections else "sweep"
    if whole:
        titles = sections
    else:
        options = [option for option in options if option.everyday]
        # The everyday options of a training are few enough for one section.
        titles = [SWEEP if option.section == SWEEP else TRAINING for option in options]
    for title in dict.fromkeys(titles):
        chosen = [option for option, its in zip(options, titles, strict=True) if its == title]
        _write_options(ctx, formatter, f"{title} options", chosen)
    click.echo(formatter.getvalue())
    if not whole:
        verb = str(ctx.command.name).replace("-", " ")  # sweep-run is typed as `sweep run`
        click.echo(f"`{hints.command(verb, '--help-all')}` lists all options.")
    example = {
        "training": "--batch-size by TRAINBOX_BATCH_SIZE",
        "sweep": "--seeds by TRAINBOX_SEEDS",
    }
    click.echo(f"Each {kind} option can also be set by the environment: {example[kind]}.")
    ctx.exit()


def _write_options(
    ctx: click.Context, formatter: click.HelpFormatter, title: str, options: Iterable[Option]
) -> None:
    with formatter.section(title):
        formatter.write_dl(
            [record for option in options if (record := option.get_help_record(ctx))]
        )
