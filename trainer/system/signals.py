"""Being asked to stop: a signal sets a flag, the loop reads it between two steps."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

_PR_SET_PDEATHSIG = 1

# What asks to save and stop, and what each is called. The supervisor hands a SIGINT on as SIGUSR2,
# since Python makes a traceback of a SIGINT that comes before there is a handler.
STOP_SIGNALS = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGINT: "SIGINT",
    signal.SIGUSR2: "SIGINT",
    signal.SIGHUP: "SIGHUP",
}


class StopRequest:
    """Whether this process was told to save and stop, and by which signal."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @classmethod
    def install(cls) -> "StopRequest":
        """Take the signals that ask to stop; a rank of torchrun's also dies when torchrun does."""
        stop = cls()
        handle_stop_signals(stop._note)
        if "LOCAL_RANK" in os.environ:
            die_with_parent()
        return stop

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = STOP_SIGNALS[signal.Signals(number)]

    def __bool__(self) -> bool:
        return self.signal_name is not None


def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Have `handler` called at each signal that asks to stop, but for a SIGHUP that nohup
    ignores.
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:
            signal.signal(number, handler)


def hand_on(number: int) -> signal.Signals:
    """Return the signal by which a process that may not have handlers yet hears of `number`."""
    return signal.SIGUSR2 if number == signal.SIGINT else signal.Signals(number)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however that ends: no orphan trains on
    unseen.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_signals_to_the_parent() -> None:
    """For a loader worker: outlive a SIGTERM to the whole group, so that the rank can still
    save.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
