"""Agree on a stop: a signal sets a flag, which the ranks compare every 25 ms."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from trainbox import ranks
from trainbox.errors import WrongUse
from trainbox.processes.process_tree import STOP_SIGNALS, heeded_stop_signals

VOTE_EVERY_S = 0.025
_MOST_CALLS = 32  # steps may become slower before the next vote


def steps_to_vote(step_s: float, before: int, most: int) -> int:
    """Return the steps that take about `VOTE_EVERY_S` if each takes `step_s`, but at least one.

    These are at most `most`, and at most twice `before`.
    """
    return max(1, min(int(VOTE_EVERY_S / max(step_s, 1e-9)), 2 * before, most))


class AgreedStop:
    """Whether this process or another rank was asked to stop."""

    def __init__(self) -> None:
        self._asked = self._agreed = False
        self._earlier: dict[signal.Signals, Any] = {}
        # The number of calls from the last vote to the next one, how many of them are left, and
        # the time of the last vote.
        self._calls = self._left = 1
        self._since_s: float | None = None

    def agreed(self) -> bool:
        """Return whether any rank was asked to stop; see `stop_requested`."""
        if not self._earlier:
            self._install()
        if self._agreed:
            return True
        self._left -= 1
        if self._left > 0:
            return False
        if ranks.world_size() == 1:
            self._agreed = self._asked
        else:
            self._vote()
        return self._agreed

    def _vote(self) -> None:
        """Agree with the other ranks on a stop, and on the number of calls until the next vote."""
        wish, now = 1, time.monotonic()
        if self._since_s is not None:
            seconds = (now - self._since_s) / self._calls
            wish = steps_to_vote(seconds, self._calls, _MOST_CALLS)
        stop, least = ranks.largest([self._asked, -wish])
        self._agreed, self._calls = bool(stop), -least
        self._left, self._since_s = self._calls, time.monotonic()

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise WrongUse(
                "the first call of trainbox.stop_requested() is in a thread, and Python handles "
                "signals only in the main thread: call it there first"
            )
        self._earlier = heeded_stop_signals()
        for number in self._earlier:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self._asked = self._asked, True
        earlier = self._earlier[signal.Signals(number)]
        if earlier is signal.default_int_handler and not again:
            # sys.stderr may be in use by the code that the signal has interrupted.
            os.write(2, b"\ntrainbox: stopping soon; press Ctrl-C again to stop at once\n")
        elif callable(earlier):
            earlier(number, frame)


_request = AgreedStop()


def stop_requested() -> bool:
    """Return whether the script must save and exit, with the same answer on all ranks.

    The first call installs handlers of SIGTERM, SIGINT, SIGUSR1 and SIGHUP. From then on, such a
    signal makes this function return True, now or at one of the next calls. It then stays True. A
    second SIGINT raises KeyboardInterrupt. If the script has installed a handler before, it is
    called as well.

    With several ranks, each rank must call this at the same step, for example once after each
    optimizer step. About every 25 ms a call waits for the other ranks and compares the answers. The
    calls in between cost about a microsecond.

    Raises:
        WrongUse: The first call is in a thread, or torchrun has started several ranks and
            torch.distributed is not initialized.
    """
    return _request.agreed()


def ignore_stop_signals(worker: int = 0) -> None:
    """Let a worker of a DataLoader ignore stop signals; pass this as its `worker_init_fn`.

    A scheduler, or Ctrl-C in a terminal, sends the signal to all processes. Without its workers, a
    rank cannot finish its step. The workers still exit with their rank.
    """
    del worker  # the number of the worker, which torch passes
    for number in {*STOP_SIGNALS} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        # torch ends its workers with SIGTERM, so a worker must know the sender. Only a thread that
        # waits for the signal learns it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_for_rank, name="signals", daemon=True).start()


def _exit_for_rank() -> None:
    """Exit when the process that has started this worker sends SIGTERM."""
    parent = multiprocessing.parent_process()
    while parent is None or signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)
