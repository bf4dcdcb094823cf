"""The verb `plan`, which shows what `train` would launch."""

import dataclasses
import json
from typing import Any

import click

from entrypoint.cli.checking import checked_plan
from entrypoint.cli.experiment import Launch
from entrypoint.cli.help_pages import help_options
from entrypoint.cli.options import PASS_ON, launch_options


@click.command(cls=Launch, context_settings=PASS_ON, options_metavar="[OPTIONS]")
@launch_options
@help_options
@click.argument("training", nargs=-1, type=click.UNPROCESSED, metavar="[TASK]")
def plan(training: tuple[str, ...], **options: Any) -> None:
    """Print as JSON what `train` would launch with the same arguments, and why; start nothing.

    \b
    Examples:
      trainbox plan mnist --gpus 3
      GPU_IDS=0,2 trainbox plan
    """
    decided, _ = checked_plan(training, options)
    click.echo(json.dumps(dataclasses.asdict(decided), indent=2))
