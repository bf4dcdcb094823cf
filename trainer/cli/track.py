"""The command `track`."""

import os
import resource
import select
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainbox.contract.errors import WrongUse
from trainer.cli.invocation import Verb
from trainer.system.signals import handle_stop_signals

if TYPE_CHECKING:
    from trainer.track.upload import Tracker

_LOOK_EVERY_S = 5.0


@click.command(cls=Verb)
@click.argument(
    "folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN..."
)
@click.option("--to", type=click.Choice(["mlflow", "wandb"]), required=True, help="The tracker.")
@click.option(
    "--project",
    metavar="NAME",
    help="The project of wandb, or the experiment of MLflow. Default: WANDB_PROJECT or "
    "MLFLOW_EXPERIMENT_NAME, or trainbox.",
)
@click.option("--follow", is_flag=True, help="Wait for new entries and send them, until Ctrl-C.")
def track(folders: tuple[Path, ...], to: str, project: str | None, follow: bool) -> None:
    """Send the metrics, settings and digests of runs to MLflow or Weights & Biases.

    RUN is the folder of a run, or of a sweep with all its trials. Each value is sent once: the same
    command sends only what is new. The package mlflow or wandb must be installed.

    \b
    Examples:
      trainbox track runs/digits-7d2c1a90 --to mlflow
      trainbox track runs/* --to wandb --project digits
      trainbox track runs/digits-sweep-7d2c1a90 --to mlflow --follow
    """
    from trainer.track import upload

    if not follow:
        click.echo(upload.send_once(folders, _tracker(to, project)))
        return
    wait = _until_a_signal()
    # Each run that is followed keeps its folder open, and a sweep can have thousands.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    tracker = _tracker(to, project)
    click.echo(f"following: new entries are sent to {tracker.place}; Ctrl-C ends this command")
    upload.follow(folders, tracker, wait, click.echo)


def _tracker(to: str, project: str | None) -> "Tracker":
    """Open the tracker.

    Raises:
        WrongUse: The package is not installed, or the tracker refuses.
        NetworkFailure: The tracker cannot be reached.
        StorageFailure: The tracker's local database or folder cannot be read or written.
    """
    try:
        if to == "mlflow":
            from trainer.track.to_mlflow import MlflowTracker

            return MlflowTracker(project)
        from trainer.track.to_wandb import WandbTracker

        return WandbTracker(project)
    except ImportError as error:
        # The missing package may be that of a database: MySQLdb is a module of mysqlclient.
        module = (isinstance(error, ModuleNotFoundError) and error.name) or to
        package = (
            to if module.partition(".")[0] == to else f"the package that has the module {module}"
        )
        raise WrongUse(
            f"--to {to}: {error}: install {package}: write its name to a file my.txt and run "
            "`make extra-venv REQUIREMENTS=my.txt`, or install it with pip"
        ) from error


def _until_a_signal() -> Callable[[], bool]:
    """Return a function that waits for some seconds, and returns whether a signal has arrived.

    A second signal raises KeyboardInterrupt.
    """
    read, write = os.pipe()
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        os.write(write, b".")

    handle_stop_signals(note)
    return lambda: bool(select.select([read], [], [], _LOOK_EVERY_S)[0])
