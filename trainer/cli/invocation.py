"""Read and check what one call of a command was given."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from trainbox.contract.environment import check_names, unknown_names
from trainbox.contract.errors import WrongUse
from trainbox.contract.run_name import is_run_name
from trainbox.contract.streams import message_line
from trainer.task_loading.fields import parse_fields, static_fields
from trainer.task_loading.modules import overruled
from trainer.task_loading.spec import locate


def read_device(device: str, device_on_stdin: bool) -> str:
    """Return the device that the launcher writes to standard input, or else `device`."""
    return (sys.stdin.readline().strip() if device_on_stdin else "") or device


class Verb(click.Command):
    """A command that refuses unknown TRAINBOX_ variables, except with `--help`."""

    def invoke(self, ctx: click.Context) -> Any:
        if unknown := unknown_names(os.environ, _settings(self)):
            # The settings of the other commands are known as well. Most calls do without them.
            check_names(unknown, all_settings(ctx.find_root()))
        return super().invoke(ctx)


def all_settings(ctx: click.Context) -> set[str]:
    """Return the environment variables of all commands of the group."""
    group = ctx.command
    assert isinstance(group, click.Group)
    commands = [group.get_command(ctx, name) for name in group.list_commands(ctx)]
    return {name for command in commands if command for name in _settings(command)}


def _settings(command: click.Command) -> set[str]:
    return {name for param in command.params for name in variables(param)}


def variables(param: click.Parameter) -> Sequence[str]:
    """Return the environment variables of the option."""
    return [param.envvar] if isinstance(param.envvar, str) else param.envvar or []


def report_environment() -> None:
    """Print the environment variables that set an option, for the launcher, which shows them.

    With an experiment's file, the options of the command line follow, such as `--lr`.
    """
    ctx = click.get_current_context()
    names = [
        next(name for name in variables(param) if os.environ.get(name))
        for param in ctx.command.params
        if param.name
        and ctx.get_parameter_source(param.name) is click.core.ParameterSource.ENVIRONMENT
    ]
    click.echo()  # ends a line that a task may have started
    given = _on_command_line(ctx) if "experiment" in ctx.meta else []
    click.echo(" ".join([*(name for name in names if name != "TRAINBOX_DEVICE"), *given]))


def _on_command_line(ctx: click.Context) -> list[str]:
    """Return the task and the options of the command line, except --config and hidden options."""
    return [
        f"--{param.opts[0].lstrip('-')}"
        for param in ctx.command.params
        if param.name
        and param.name != "config"
        and (isinstance(param, click.Argument) or getattr(param, "section", ""))
        and ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
    ]


def without_replaced(settings: dict[str, Any]) -> dict[str, Any]:
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


def task_fields(task: str, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Return the task's fields from --config and --set.

    If the source of the task can be read without importing it, the fields are checked.

    Raises:
        WrongUse: A pair is malformed, or a field does not exist or has another type.
    """
    meta = click.get_current_context().meta
    given, written = dict(meta.get("fields", {})), meta.get("written", {})
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise WrongUse(f"--set {pair}: write NAME=VALUE, as in --set width=64")
        given[name] = value
        written.pop(name, None)
    fields = static_fields(task)
    return given if fields is None else parse_fields(task, fields, given, written)


def warn_of_overruled_imports(task: str) -> None:
    """Warn of imports that load another module than the user's file of that name.

    Only the launcher's check calls this, so that the ranks do not repeat the warning.
    """
    file_or_module, _ = locate(task)
    for line in overruled(file_or_module):
        click.echo(message_line(line), err=True)


def check_run(verb: str, run: Path, *others: str) -> None:
    """Raise WrongUse if `run` is not the folder of a run, or lacks one of the `others`."""
    for name in ("config.json", "manifest.json", *others):
        if not (run / name).is_file():
            raise WrongUse(
                f"{verb} {run}: {name} is missing: give the folder of a run, such as "
                "runs/digits-7d2c1a90"
            )


def check_run_name(run: str | None, option: str = "--run") -> None:
    """Raise WrongUse if `run`, the value of `option`, cannot be the name of a folder."""
    if run is not None and not is_run_name(run):
        raise WrongUse(
            f"{option} {run!r} must be a folder name, not a path: "
            "set the parent folder with --runs-dir"
        )
