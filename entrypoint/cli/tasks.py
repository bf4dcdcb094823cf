"""The verb `tasks`, which the trainer runs."""

import click

from entrypoint.cli.options import PASS_ON
from entrypoint.system.forks import become


@click.command(context_settings=PASS_ON)
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def tasks(rest: tuple[str, ...]) -> None:
    """List the tasks, or one task's fields: `trainbox tasks mnist`."""
    become("trainer", "tasks", *rest)
