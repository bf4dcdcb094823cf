"""Read the table [launch] of an experiment's file, and describe where the settings come from."""

import os
from collections.abc import Sequence
from pathlib import Path

import click

from entrypoint.cli.options import Option, launch_options
from trainbox.contract.errors import WrongUse
from trainbox.contract.experiment import PER_GPU, SUFFIX, option_defaults, read_experiment

# One of these replaces all of them in the file.
_GPUS = ("gpus", "gpu_ids")
_COUNTS = (*_GPUS, "processes")
_WITHOUT_GPUS = ("cpu", "mps")


class Launch(click.Command):
    """A command whose launch options have the defaults of the file exp.toml of --config."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        path = experiment_file(args)
        if path is None:
            return super().parse_args(ctx, args)
        apply_experiment(ctx, path)
        rest = super().parse_args(ctx, args)
        without_replaced(ctx)
        return rest


def experiment_file(args: list[str]) -> Path | None:
    """Return the file of --config if it is one of TOML. The trainer reads the other files."""
    if args[:1] == ["show"] or {"--help", "-h", "--help-all"} & set(args):
        return None
    path = os.environ.get("TRAINBOX_CONFIG", "")
    for index, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        if name == "--config":
            path = value if equals else "".join(args[index + 1 : index + 2])
    return Path(path) if Path(path).suffix == SUFFIX else None


def apply_experiment(ctx: click.Context, path: Path) -> None:
    """Take the values of [launch] as defaults of the launch options.

    A sweep takes --per-gpu from [sweep].

    Raises:
        WrongUse: the file, a key or a value is wrong. The message has one line.
    """
    try:
        tables, digest = read_experiment(path)
        # A sweep knows the options of one training as well, and does not use them.
        options = _by_key(click.command()(launch_options(_nothing)))
        defaults = option_defaults(ctx, f"{path}: [launch]", tables["launch"], options)
        own = _by_key(ctx.command)
        if PER_GPU in own and PER_GPU in tables["sweep"]:
            per_gpu = {PER_GPU: tables["sweep"][PER_GPU]}
            defaults |= option_defaults(ctx, f"{path}: [sweep]", per_gpu, own)
    except ValueError as error:
        raise WrongUse(str(error)) from error
    ctx.meta["experiment"] = (path, digest)
    ctx.default_map = defaults


def _nothing() -> None:
    """The body of a command that only lists options."""


def _by_key(command: click.Command) -> dict[str, Option]:
    return {
        param.opts[0].lstrip("-"): param for param in command.params if isinstance(param, Option)
    }


def without_replaced(ctx: click.Context) -> None:
    """Drop the GPUs and processes of the file if the user chooses others.

    A chosen device without GPUs drops the GPUs.
    """
    source, from_file = ctx.get_parameter_source, click.core.ParameterSource.DEFAULT_MAP
    replaced: tuple[str, ...] = ()
    if any(ctx.params[name] is not None and source(name) != from_file for name in _COUNTS):
        replaced = _COUNTS
    elif ctx.params["device"] in _WITHOUT_GPUS and source("device") != from_file:
        replaced = _GPUS
    dropped = [name for name in replaced if source(name) == from_file]
    ctx.params.update(dict.fromkeys(dropped))


def origin(ctx: click.Context, training: Sequence[str]) -> str:
    """Return `from exp.toml; gpus, lr from the command line`.

    `training` has the training options of the command line, such as `--lr`.
    """
    path, _ = ctx.meta["experiment"]
    launch = [
        key
        for key, option in _by_key(ctx.command).items()
        if option.name
        and ctx.get_parameter_source(option.name) is click.core.ParameterSource.COMMANDLINE
    ]
    given = [*launch, *(name.lstrip("-") for name in training)]
    return f"from {path}" + (f"; {', '.join(given)} from the command line" if given else "")


def record(ctx: click.Context) -> dict[str, str]:
    """Return the variable with the file's digest and name, for the trainer's manifest."""
    path, digest = ctx.meta["experiment"]
    return {"TRAINBOX_EXPERIMENT": f"{digest} {path}"}
