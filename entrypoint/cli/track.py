"""The verb `track`, which the trainer runs."""

import click

from entrypoint.cli.options import PASS_ON
from entrypoint.system.forks import become


@click.command(context_settings=PASS_ON)
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def track(rest: tuple[str, ...]) -> None:
    """Send runs to a tracker: `trainbox track runs/digits-7d2c1a90 --to mlflow`."""
    become("trainer", "track", *rest)
