"""Run the plan's child: forward signals to it, end it if it hangs, answer with its exit code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Protocol

from entrypoint.errors import HARDWARE, PREEMPTED, WRONG_USE
from entrypoint.system.processes import die_with_parent
from entrypoint.system.streams import message

# Of the 60 s that compose and Kubernetes give (stop_grace_period), so that our own message comes
# before their SIGKILL.
STOP_BUDGET_S = 50
_POLL_S = 0.2
_DEATH_S = 5.0  # of a killed process; one that computes on a broken GPU may never end
# `docker compose run` delivers each signal twice, about 10 ms apart: that is one wish
_ECHO_S = 0.3
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Python makes a traceback of a SIGINT that comes before there is a handler. The trainer calls it
# SIGINT again.
_HANDED_ON = {signal.SIGINT: signal.SIGUSR2}
# a lost process, a killed one: what a broken GPU can look like
_OTHERS_FAULTS = (7, *range(129, 160))


class Watch(Protocol):
    """Looks at the hardware beside the child."""

    def fatal(self) -> str | None:
        """Why the child must save and stop, or None; returns at once."""

    def last_look(self) -> str | None:
        """The same, after it has ended: it may wait a moment."""


def supervise(
    argv: Sequence[str],
    env: Mapping[str, str],
    stop_budget_s: float = STOP_BUDGET_S,
    watch: Watch | None = None,
    resumes: bool = True,
) -> int:
    """Start `argv`, stay its parent, and return the exit code to end with.

    The first SIGTERM, SIGINT, SIGUSR1 or SIGHUP reaches the child: save and stop. A second one, or
    `stop_budget_s` without an end, kills it. A child killed by signal N gives 128 + N, as in a
    shell. What `watch` calls fatal is such a signal too, and the end is then the hardware's (3),
    unless the child finished. `resumes` is False for a child whose checkpoints are removed with it,
    as in `verify`.
    """
    received: list[int] = []
    received_at = 0.0

    def note(number: int, _frame: FrameType | None) -> None:
        nonlocal received_at
        now = time.monotonic()
        if not received or now - received_at > _ECHO_S:
            received.append(number)
        received_at = now

    for number in _STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish stands
            signal.signal(number, note)
    if received:
        return PREEMPTED
    child = subprocess.Popen(
        argv,
        env=dict(env),
        # a terminal's Ctrl-C then reaches us alone, and the ranks hear of it once
        start_new_session=True,
        # there are no threads here
        preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
    )
    stopping = "saving a checkpoint, then stopping" if resumes else "stopping"
    forwarded, deadline, broken, heard = False, 0.0, None, 0
    while True:
        try:
            return _exit_code(child.wait(timeout=_POLL_S), forwarded, watch, broken, resumes)
        except subprocess.TimeoutExpired:
            pass
        broken = broken or (watch.fatal() if watch else None)
        if (received or broken) and not forwarded:
            forwarded, deadline, heard = True, time.monotonic() + stop_budget_s, len(received)
            name = signal.Signals(received[0]).name if received else ""
            message(
                f"{name} received: {stopping} (again: stop at once)"
                if name
                else f"the hardware fails: {stopping} (a signal: stop at once)"
            )
            number = signal.Signals(received[0]) if received else signal.SIGTERM
            child.send_signal(_HANDED_ON.get(number, number))
        again = len(received) > heard
        if forwarded and (again or time.monotonic() > deadline):
            why = (
                "second signal" if again else f"not stopped {stop_budget_s:.0f} s after the signal"
            )
            whole = (
                "the newest checkpoint before it is whole, and the same command resumes from there"
            )
            message(f"{why}: killed; {whole if resumes else _again(resumes)}")
            _kill_session(child)
            # one more would end this process before it can exit with its code
            for number in _STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            if broken:
                return HARDWARE
            return 128 + (received[-1] if again else signal.SIGKILL)


def _exit_code(
    code: int, forwarded: bool, watch: Watch | None, broken: str | None, resumes: bool
) -> int:
    """The code to end with, of the child's: a broken GPU's if that is behind a crash, a stop or a
    wrong number.
    """
    if forwarded and -code in (*_STOP_SIGNALS, *_HANDED_ON.values()):
        code = PREEMPTED  # it had not begun, so nothing is lost
    finished = code in (0, WRONG_USE)
    looks_broken = code in (1, PREEMPTED, *_OTHERS_FAULTS) or code < 0
    if not finished and (broken or (watch and looks_broken and watch.last_look())):
        return HARDWARE
    if code < 0:
        known = -code in list(signal.Signals)
        message(
            "the training was killed by "
            f"{signal.Signals(-code).name if known else f'signal {-code}'}: {_again(resumes)}"
        )
    return code if code >= 0 else 128 - code


def _again(resumes: bool) -> str:
    return (
        f"the same command {'resumes from the newest checkpoint' if resumes else 'starts it again'}"
    )


def _kill_session(child: subprocess.Popen[bytes]) -> None:
    """The ranks are sessions of their own under torchrun; they ask the kernel to die with it."""
    os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(timeout=_DEATH_S)
    except subprocess.TimeoutExpired:
        message(
            f"process {child.pid} does not die: it hangs in the kernel, most likely in the "
            "GPU's driver"
        )
