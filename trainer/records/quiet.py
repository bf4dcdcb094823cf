"""Notice that a training makes no progress, such as with a loader or a step that hangs."""

import sys
import threading
import time
from collections.abc import Callable

from trainbox.errors import NetworkFailure
from trainer.system.report import end_with

_NOTE_MINUTES = 10.0


class Quiet:
    """The time without progress: a step, or a batch of a validation."""

    def __init__(self, hang_minutes: float | None, say: Callable[[str], None]) -> None:
        """Begin to wait. A training without progress for `hang_minutes` is ended with code 7."""
        self._hang_minutes, self._say, self._has_said = hang_minutes, say, False
        self._since_s = time.monotonic()
        self.has_begun = False

    def progress(self) -> None:
        """Note that the training goes on."""
        self._since_s, self._has_said, self.has_begun = time.monotonic(), False, True

    def look(self) -> None:
        """Print what a training without progress waits for, once. Call this in another thread."""
        minutes = (time.monotonic() - self._since_s) / 60
        limit = self._hang_minutes
        if limit and minutes > limit:
            end_with(
                NetworkFailure(
                    f"no step for {limit:g} minutes, {_waits_for()}: ended by --hang-minutes; the "
                    "same command resumes from the newest checkpoint, if there is one"
                )
            )
        if minutes > _NOTE_MINUTES and not self._has_said:
            self._has_said = True
            self._say(
                f"no step for {_NOTE_MINUTES:g} minutes, {_waits_for()}: --hang-minutes N ends "
                "such a training after N minutes"
            )


def _waits_for() -> str:
    """Return where the main thread is, in code of the task or of Trainbox."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/lib/python" not in file and not file.startswith("<"):
            what = "a batch of the data" if "/trainer/data/" in file else frame.f_code.co_name
            return f"waiting for {what} ({file}, line {frame.f_lineno})"
        frame = frame.f_back
    return "waiting"
