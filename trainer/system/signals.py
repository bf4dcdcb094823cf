"""Handle the signals that request a stop.

A signal sets a flag, which the loop reads between two steps. Before the first step of a training,
nothing can be lost, so a signal ends the process. It then has its default action: a handler of
Python would not run while the process waits for another rank in torch's code.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from trainbox.errors import INTERRUPT, Stopped
from trainbox.processes import process_tree
from trainbox.processes.environment import Internal
from trainbox.processes.process_tree import die_with_parent
from trainbox.processes.streams import stop_waiting_for_readers

# Signals that request a checkpoint and a stop, with the names for messages.
STOP_SIGNALS = {
    **{number: number.name for number in process_tree.STOP_SIGNALS},
    INTERRUPT: "SIGINT",
    signal.SIGXCPU: "SIGXCPU (the CPU time limit, `ulimit -t`)",
}


class StopRequest:
    """Whether this process must save and stop, and the signal that requested it.

    Attributes:
        ends_at_once: Whether a signal ends the process instead.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.ends_at_once = False

    @classmethod
    def install(cls, ends_at_once: bool = False) -> "StopRequest":
        """Install handlers of the stop signals. A rank of torchrun also exits with torchrun."""
        stop = cls()
        stop.ends_at_once = ends_at_once
        handle_stop_signals(signal.SIG_DFL if ends_at_once else stop._note)
        if agent := os.environ.pop(Internal.AGENT, None):
            die_with_parent(int(agent))
        return stop

    def begin(self) -> None:
        """From now on, a signal requests a stop, and does not end the process."""
        if self.ends_at_once:
            self.ends_at_once = False
            handle_stop_signals(self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = STOP_SIGNALS[signal.Signals(number)]
        stop_waiting_for_readers()

    def __bool__(self) -> bool:
        return self.signal_name is not None

    @property
    def cause(self) -> str:
        """What has stopped the ranks, for a message: this process may have got no signal."""
        return self.signal_name or "a signal to another process"


def handle_stop_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> None:
    """Call `handler` for each stop signal, except for a SIGHUP that nohup ignores."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:
            signal.signal(number, handler)


class _Stop(BaseException):
    """A stop signal. torch catches each Exception during an export."""


@contextlib.contextmanager
def interruptible(what: str) -> Iterator[None]:
    """End the body at the first stop signal, wherever it is.

    Raises:
        Stopped: a signal has arrived. `what` names the work in the message.
    """

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        raise _Stop(signal.Signals(number))

    handle_stop_signals(stop)
    try:
        yield
    except _Stop as end:
        number = end.args[0]
        raise Stopped(
            f"stopped by {STOP_SIGNALS[number]} before the end of {what}: start the same command "
            "again",
            exit_code=128 + number,
        ) from None


def forwarded_signal(number: int) -> signal.Signals:
    """Return the signal to send instead of `number` to a process that may not have handlers yet."""
    return INTERRUPT if number == signal.SIGINT else signal.Signals(number)


def leave_signals_to_the_parent(parent: int | None) -> None:
    """Ignore stop signals in a loader worker, and exit with the rank, the process `parent`.

    A scheduler may send SIGTERM to all processes. torch restores the default action of SIGTERM in
    its workers, and without a worker the rank could not finish its step and save a checkpoint.
    """
    process_tree.ignore_stop_signals()
    die_with_parent(parent)
