"""The verb `export`, which the trainer runs."""

import click

from entrypoint.cli.options import PASS_ON
from entrypoint.system.forks import become


@click.command(context_settings=PASS_ON)
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def export(rest: tuple[str, ...]) -> None:
    """Export the model of a run as a file: `trainbox export runs/digits-7d2c1a90`."""
    become("trainer", "export", *rest)
