"""What the commands of both programs share: their help page, and the refusal of unknown names."""

import os
import re
import sys
from collections.abc import Collection, Iterable

import click

from trainbox.commands import habits, mistyped
from trainbox.disclosure import suggested_commands
from trainbox.disclosure.variables import LAUNCH_NAMES
from trainbox.errors import Failure, WrongUse
from trainbox.options.table import PREFIX, SETTINGS_BY_NAME
from trainbox.processes.environment import Internal

PAGE = {"help_option_names": ["--help", "-h"], "max_content_width": 110}
TEMPLATE = "template"  # the key of a script's arguments in the context
# Variables that Trainbox, the image, make, deployments and users set. They are not settings.
NOT_SETTINGS = frozenset(Internal) | {
    PREFIX + name
    for name in ("BUILD_INFO", "COMMAND", "DRIVER_DEADLINE_S", "HEARTBEAT", "IMAGE_DIGEST")
}
# Kubernetes sets these variables for a Service with the name trainbox or trainbox-...
_OF_A_SERVICE = re.compile(
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$"
)
_EXTRA = re.compile(r"unexpected extra arguments? \((.*)\)")


class Command(click.Command):
    """A command with our message for an option without its value, also if another option follows.

    click takes `--epochs` for the value in `--run --epochs 3`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = {
            name: param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in (*param.opts, *param.secondary_opts)
        }
        waiting = args[: args.index("--")] if "--" in args else [*args]
        while waiting:
            word, param = waiting[0], named.get(waiting.pop(0))
            if param is None and not word.startswith("-") and not ctx.allow_interspersed_args:
                break  # what follows a script is its own
            if param and not param.is_flag and not param.count:
                if not waiting or waiting[0] in named:
                    raise WrongUse(f"{word} needs a value: write {word} {param.make_metavar(ctx)}")
                waiting.pop(0)
        return super().parse_args(ctx, args)


class Templated(Command):
    """A command that takes what follows `--` as the template of a script's arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[TEMPLATE] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])


def failure_of(error: click.ClickException | Failure) -> Failure:
    """Return an error of click as a failure, with the form of what was mistyped as its cure."""
    if isinstance(error, Failure):
        return error
    ctx = getattr(error, "ctx", None)
    if ctx and isinstance(error, click.BadParameter) and error.param:
        error.param_hint = error.param.get_error_hint(ctx) + _source(error.param, ctx)
    problem, no_boolean, _ = error.format_message().partition(" is not a valid boolean")
    if no_boolean:  # click lists all words that it knows
        problem += " is neither true nor false"
    if isinstance(error, click.BadParameter) and (cure := _choice(error)):
        problem = f"{problem.rstrip('.')}: {cure}"
    if ctx and isinstance(error, click.NoSuchOption) and isinstance(ctx.command, click.Group):
        return WrongUse(mistyped.option_before_verb(error.option_name, sys.argv[1:], ctx))
    if ctx and isinstance(error, click.NoSuchOption):
        problem, has_cure = mistyped.unknown_option(error.option_name, sys.argv, ctx.command)
        if has_cure:
            return WrongUse(problem)
        with_fields = mistyped.has_fields(ctx.command)
        page = "--help-all" if with_fields else "--help"
        listed = suggested_commands.command(ctx.command.name or "", page)
        problem += f": `{listed}` lists the options"
        if with_fields and error.option_name.startswith("--"):
            field = mistyped.as_a_field(error.option_name, sys.argv)
            problem += f", and a field of this name in the task is set by {field}"
        return WrongUse(problem)
    if ctx and (type(error) is click.UsageError or isinstance(error, click.MissingParameter)):
        extra = _EXTRA.search(error.message)
        if extra and (cure := mistyped.extra_argument(extra[1], sys.argv, ctx.command)):
            return WrongUse(f"{problem.rstrip('.')}: {cure}")
        pieces = " ".join(ctx.command.collect_usage_pieces(ctx))
        verb = "" if isinstance(ctx.command, click.Group) else ctx.info_name or ""
        problem = (
            f"{problem.rstrip('.')}: the usage is `{suggested_commands.command(verb, pieces)}`"
        )
    return WrongUse(problem)


def _choice(error: click.BadParameter) -> str:
    """Return a question with the choice that a wrong value may mean, or ""."""
    if error.param is None or not isinstance(error.param.type, click.Choice):
        return ""
    value = error.message.rpartition(" is not one of ")[0].strip("'")
    return mistyped.wrong_choice(value, list(map(str, error.param.type.choices)))


def _source(param: click.Parameter, ctx: click.Context) -> str:
    """Return ` (from LR)` for a value of the environment or of a file, and else nothing."""
    source = ctx.get_parameter_source(param.name or "")
    if source is click.core.ParameterSource.ENVIRONMENT:
        return f" (from {variable_of(param)})"
    return " (from --config)" if source is click.core.ParameterSource.DEFAULT_MAP else ""


def variable_of(param: click.Parameter) -> str:
    """Return the variable that has set the parameter: the first of its names with a value."""
    names = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
    return next(name for name in names if os.environ.get(name))


def unknown_names(names: Iterable[str], settings: Collection[str]) -> list[str]:
    """Return the names with our prefix that are neither in `settings` nor in NOT_SETTINGS."""
    return sorted(
        name
        for name in names
        if name.startswith(PREFIX)
        and name not in settings
        and name not in NOT_SETTINGS
        and not _OF_A_SERVICE.search(name)
    )


def check_names(names: Iterable[str], settings: Collection[str]) -> None:
    """Check that each TRAINBOX_ name is one of `settings` or in NOT_SETTINGS.

    Raises:
        WrongUse: a name is unknown. The message suggests the nearest setting.
    """
    if unknown := unknown_names(names, settings):
        raise WrongUse(f"{unknown[0]} is not a setting: {_remedy(unknown[0], settings)}")


def _setting(option: str, settings: Collection[str]) -> str:
    """Return the variable of an option, or `NAME=VALUE` for `device cpu`; "" without a variable."""
    key, _, value = option.partition(" ")
    plain = key.upper().replace("-", "_")
    name = plain if plain in LAUNCH_NAMES else PREFIX + plain
    if name not in (plain, *settings):
        return ""
    return f"{name}={value}" if value else name


def _remedy(name: str, settings: Collection[str]) -> str:
    if name.removeprefix(PREFIX) in LAUNCH_NAMES:
        return f"use {name.removeprefix(PREFIX)}"
    # Compare without the prefix, which would make all names similar. Users may know a setting by
    # another name, as LEARNING_RATE or MAX_EPOCHS.
    plain = name.removeprefix(PREFIX).upper()
    options = {known: row.key for known, row in SETTINGS_BY_NAME.items()} | {
        known: option.strip("-") for known, option in habits.OPTIONS.items()
    }
    known = {setting.removeprefix(PREFIX): setting for setting in sorted(settings)} | {
        known.upper().replace("-", "_"): setting
        for known, option in options.items()
        if (setting := _setting(option, settings))
    }
    import difflib

    if near := difflib.get_close_matches(plain, known, n=1):
        return f"did you mean {known[near[0]]}?"
    return f"unset it; `{suggested_commands.command('train', '--help')}` lists the settings"
