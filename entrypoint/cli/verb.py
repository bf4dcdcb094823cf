"""Commands of the option table, with their help and the file of --config."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trainbox.commands.command_page import PAGE, Command, check_names, unknown_names, variable_of
from trainbox.commands.mistyped import option_of_torchrun, unknown_option
from trainbox.commands.settings_file import FileSettings, read_settings
from trainbox.disclosure import suggested_commands
from trainbox.errors import WrongUse
from trainbox.options import table
from trainbox.options.table import COMMANDS, CONFIG, PREFIX

# If the command line or the environment sets one option of a group, the other options of the group
# in the file of --config do not count.
_ALTERNATIVES = (
    ("gpus", "gpu_ids", "processes"),
    ("epochs", "max_steps"),
    ("batch_size", "batch_size_per_gpu"),
)
_FROM_FILE = click.core.ParameterSource.DEFAULT_MAP
_FROM_USER = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
_LIKE_AN_OPTION = 0.85  # GPU and GPUS
_FILE = "trainbox.file"  # the key of the file's settings in the context


def verb(name: str, cls: type[click.Command] = Command, **attributes: Any) -> Callable[..., Any]:
    """Return a decorator for the command `name` of the table."""
    parameters = [row.click() for row in COMMANDS[name]]
    context = {**PAGE, **attributes.pop("context_settings", {})}
    return click.command(name, cls, params=parameters, context_settings=context, **attributes)


class Verb(Command):
    """A command that refuses unknown variables with our prefix."""

    def invoke(self, ctx: click.Context) -> Any:
        settings = {name for rows in COMMANDS.values() for name in table.variables(rows)}
        self.check_names({name for name in settings if name.startswith(PREFIX)})
        return super().invoke(ctx)

    def check_names(self, settings: set[str]) -> None:
        """Check the names of the environment; `settings` are the variables of all commands.

        Raises:
            WrongUse: a name is unknown.
        """
        check_names(os.environ, settings)


class Sectioned(Verb):
    """A command with the settings of a training, which the file of --config can also have.

    Example: `trainbox train --help-all` lists all options in sections, `--help` the everyday ones.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        for param in self.params:
            # click handles an eager option before the others, whose defaults are then known.
            if param.name == CONFIG.parameter:
                param.is_eager, param.expose_value, param.callback = True, False, _read_file
        self.params.append(
            click.Option(
                ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        if sum(word.partition("=")[0] == CONFIG.flags for word in own) > 1:
            raise WrongUse(f"{CONFIG.flags} is given twice: write the settings into one file")
        rest = super().parse_args(ctx, args)
        _drop_replaced(ctx)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        whole = ctx.meta.get("whole")
        rows = [
            row
            for row in table.options(str(self.name))
            if row.section and not row.hidden and (whole or row.everyday)
        ]
        if whole:
            titles = [row.section for row in rows]
        else:  # the everyday options of a training are few enough for one section
            titles = [
                row.section if row.section in ("Launch", "Sweep") else "Training" for row in rows
            ]
        for title in dict.fromkeys(titles):
            records = [
                row.click().get_help_record(ctx)
                for row, its in zip(rows, titles, strict=True)
                if its == title
            ]
            with formatter.section(f"{title} options"):
                formatter.write_dl([record for record in records if record])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        if not ctx.meta.get("whole"):
            command = suggested_commands.command(str(self.name), "--help-all")
            formatter.write(f"`{command}` lists all options.\n")
        kind, example = "training", "--batch-size by TRAINBOX_BATCH_SIZE"
        if not any(row.section == "Training" for row in table.options(str(self.name))):
            kind, example = "sweep", "--seeds by TRAINBOX_SEEDS"
        formatter.write(f"Each {kind} option can also be set by the environment: {example}.\n")


def _show_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta["whole"] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _read_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Make the settings of the file the defaults of this command (click's `default_map`).

    Example: with `lr = 0.1` in exp.toml, `train --config exp.toml` trains with 0.1, and
    `train --config exp.toml --lr 0.2` with 0.2, as with TRAINBOX_LR=0.2 in the environment.
    """
    if path is not None:
        found = ctx.meta[_FILE] = read_settings(path, ctx)
        ctx.default_map = found.defaults


def file_settings() -> FileSettings | None:
    """Return the settings of the file of --config, if this command has one."""
    found: FileSettings | None = click.get_current_context().meta.get(_FILE)
    return found


def _drop_replaced(ctx: click.Context) -> None:
    """Drop settings of the file that contradict the command line or the environment.

    Example: with `gpus = 4` in exp.toml, `train --config exp.toml --gpu-ids 0,2` drops `gpus`, and
    so does `train --config exp.toml --device cpu`.
    """
    outside = {
        name
        for name, value in ctx.params.items()
        if value is not None and ctx.get_parameter_source(name) is not _FROM_FILE
    }
    replaced = {name for names in _ALTERNATIVES if outside & {*names} for name in names}
    if "device" in outside and ctx.params["device"] in ("cpu", "mps"):
        replaced |= {"gpus", "gpu_ids"}
    for name in replaced & ctx.params.keys():
        if ctx.get_parameter_source(name) is _FROM_FILE:
            ctx.params[name] = None


class ScriptCommand(Verb):
    """A command that passes the arguments after `--` to a user's own script.

    Example: `trainbox run train.py -- --epochs 3` passes `--epochs 3` to train.py. The message for
    `trainbox run --epochs 3 train.py` shows `example`, a correct command line without the verb.
    """

    def __init__(self, *arguments: Any, example: str, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.example = example

    def check_names(self, settings: set[str]) -> None:
        """Refuse an unknown name that is like an option; the script may read any other name."""
        import difflib

        meant: dict[str, str] = {}
        for param in self.params:
            if isinstance(param, click.Option) and not param.hidden:
                option = max(param.opts, key=len)
                variables = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
                meant[option.lstrip("-").replace("-", "_").upper()] = f"use {option}"
                for name in reversed(variables):
                    is_ours = name.startswith(PREFIX)
                    cure = f"did you mean {name}?" if is_ours else f"use {name}"
                    meant[name.removeprefix(PREFIX)] = cure
        for name in unknown_names(os.environ, settings):
            plain = name.removeprefix(PREFIX).upper()
            if near := difflib.get_close_matches(plain, meant, n=1, cutoff=_LIKE_AN_OPTION):
                raise WrongUse(f"{name} is not a setting: {meant[near[0]]}")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)  # click consumes `args`
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if "--" in given:
                raise
            if isinstance(error, click.NoSuchOption):
                if cure := option_of_torchrun(error.option_name):
                    raise WrongUse(cure) from error
                problem, _ = unknown_option(error.option_name, given, ctx.command)
            elif "extra" in error.message:
                problem = error.message
            else:
                raise
            raise WrongUse(
                f"{problem}: the arguments of the script follow --, as in {self.example}"
            ) from error


def refuse_unused(invocation: str, used: set[str]) -> None:
    """Refuse the options on the command line that this invocation of a verb would ignore.

    Variables in the environment are not refused, because make and Compose set them for each verb.

    Args:
        invocation: the verb and its arguments, for the message.
        used: the names of the parameters that the invocation uses.

    Raises:
        WrongUse: the command line has another option.
    """
    ctx = click.get_current_context()
    unused = [
        "/".join([*param.opts, *param.secondary_opts])
        for param in ctx.command.params
        if param.name and param.name not in used and _source(param.name) is _FROM_USER[0]
    ]
    if unused:
        raise WrongUse(
            f"{invocation} got options that it does not use ({', '.join(unused)}): drop them"
        )


def _source(name: str) -> click.core.ParameterSource | None:
    return click.get_current_context().get_parameter_source(name)


def given_by_user(name: str) -> bool:
    """Return whether the command line or the environment has set the parameter `name`."""
    return _source(name) in _FROM_USER


def on_command_line(name: str) -> bool:
    return _source(name) is _FROM_USER[0]


def environment_names() -> list[str]:
    """Return the environment variables that have set an option."""
    return [
        variable_of(param)
        for param in click.get_current_context().command.params
        if param.name and _source(param.name) is _FROM_USER[1]
    ]


def origin() -> str:
    """Return `from exp.toml; gpus, lr from the command line`, or "" without such a file."""
    found = file_settings()
    if found is None or not found.digest:
        return ""
    given = [
        param.opts[0].lstrip("-")
        for param in click.get_current_context().command.params
        if param.name and param.name != CONFIG.parameter and on_command_line(param.name)
    ]
    return f"from {found.path}" + (f"; {', '.join(given)} from the command line" if given else "")
