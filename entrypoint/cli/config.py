"""The verb `config`, which the trainer runs."""

import click

from entrypoint.cli.options import PASS_ON
from entrypoint.system.forks import become


@click.command(context_settings=PASS_ON)
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def config(rest: tuple[str, ...]) -> None:
    """Print the settings of a run, or its file for --config: `trainbox config RUN --toml`."""
    become("trainer", "config", *rest)
