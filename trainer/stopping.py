"""Being asked to stop: a signal sets a flag, the loop reads it between two steps."""

import ctypes
import os
import signal
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1


class StopRequest:
    """Whether this process was told to save and stop, and by which signal."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @classmethod
    def install(cls) -> "StopRequest":
        """Take SIGTERM, SIGUSR1 and SIGINT; a rank of torchrun's also dies when torchrun does."""
        stop = cls()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, stop._note)
        if "LOCAL_RANK" in os.environ:
            die_with_parent()
        return stop

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self.signal_name is not None


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however that ends: no orphan trains on unseen."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_signals_to_the_parent() -> None:
    """For a loader worker: outlive a SIGTERM to the whole group, so that the rank can still save."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
