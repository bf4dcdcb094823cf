"""The help pages of the verbs whose options the trainer knows."""

from collections.abc import Callable
from typing import Any, NoReturn

import click

from entrypoint.cli.options import Option
from entrypoint.system.forks import become


def help_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--help` and `--help-all` with the launch options and the trainer's options."""
    for names, whole, text in (
        (["--help-all"], True, "Show all options."),
        (["--help", "-h"], False, "Show the everyday options."),
    ):
        command = click.option(
            *names,
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_help_of_train(whole),
            help=text,
        )(command)
    return command


def _help_of_train(whole: bool) -> Callable[[click.Context, click.Parameter, bool], None]:
    def show(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            show_help(ctx, "train", whole)

    return show


def show_help(ctx: click.Context, verb: str, whole: bool) -> NoReturn:
    """Print the launch options, and let the trainer print its options below."""
    formatter = ctx.make_formatter()
    ctx.command.format_usage(ctx, formatter)
    ctx.command.format_help_text(ctx, formatter)
    options = [param for param in ctx.command.get_params(ctx) if isinstance(param, Option)]
    if whole:
        sections = {option.section: f"{option.section} options" for option in options}
    else:
        options = [option for option in options if option.everyday]
        sections = {option.section: "Launch options" for option in options}
    for section, title in sections.items():
        records = [option.get_help_record(ctx) for option in options if option.section == section]
        with formatter.section(title):
            formatter.write_dl([record for record in records if record])
    click.echo(formatter.getvalue())
    become("trainer", verb, "--help-all-options" if whole else "--help-options")
