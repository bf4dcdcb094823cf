"""The verb `train`."""

from typing import Any

import click

from entrypoint.cli.checking import checked_plan
from entrypoint.cli.experiment import Launch
from entrypoint.cli.help_pages import help_options
from entrypoint.cli.launching import supervised
from entrypoint.cli.options import PASS_ON, launch_options
from entrypoint.launch.supervise import TRAINING, UNSAVED_TRAINING


@click.command(cls=Launch, context_settings=PASS_ON, options_metavar="[OPTIONS]")
@launch_options
@help_options
@click.argument("training", nargs=-1, type=click.UNPROCESSED, metavar="[TASK]")
def train(training: tuple[str, ...], **options: Any) -> None:
    """Train TASK (default: digits), or resume a stopped run of the same command.

    \b
    Examples:
      trainbox train                                     digits on the hardware found here
      trainbox train mnist --gpus 2 --epochs 5           two GPUs
      trainbox train fashion_mnist --batch-size 512 --lr 0.002 --lr-scaling linear
      trainbox train my_tasks/gestures.py:Gestures --set width=64
      trainbox train --processes 2 --device cpu          two gloo processes, without a GPU
    """
    # The bench removes the run folder, so nothing resumes.
    kind = UNSAVED_TRAINING if "--measure-seconds" in training else TRAINING
    supervised(*checked_plan(training, options), kind=kind)
