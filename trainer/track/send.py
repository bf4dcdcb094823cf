"""Send runs to a tracker once, or follow them."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainbox.contract.errors import WrongUse
from trainer.system.signals import handle_stop_signals
from trainer.track.upload import Tracker, send_runs

_LOOK_EVERY_S = 5.0


def send(
    folders: Sequence[Path],
    to: str,
    project: str | None,
    follow: bool,
    show: Callable[[str], None],
) -> None:
    """Send the entries of the runs in `folders` to the tracker `to`, and show what was sent.

    If they are followed, wait for new entries until a signal.
    """
    wait = _until_a_signal() if follow else None
    tracker = _tracker(to, project)
    if follow:
        show(f"following: new entries are sent to {tracker.place}; Ctrl-C ends this command")
    send_runs(folders, tracker, show, wait)


def _tracker(to: str, project: str | None) -> Tracker:
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
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    def wait() -> bool:
        until = time.monotonic() + _LOOK_EVERY_S
        while not received and time.monotonic() < until:
            time.sleep(0.1)
        return bool(received)

    handle_stop_signals(note)
    return wait
