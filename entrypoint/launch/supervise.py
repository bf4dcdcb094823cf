"""The supervisor of a launched process: it forwards signals and passes on the exit code."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol

from entrypoint.system.cgroup import CgroupMemory, memory_of_cgroups, used_up_since
from trainbox.contract.errors import (
    ExitCode,
    shell_code,
    signal_name,
    signal_of,
    stopped_without_loss,
)
from trainbox.contract.processes import (
    STOP_SIGNALS,
    adopt_orphans,
    forward_signal,
    heeded_stop_signals,
    kill_tree,
    start_child,
)
from trainbox.contract.streams import message

# Compose and Kubernetes send SIGKILL after a grace period of 60 s. This is shorter, so that the
# supervisor can still log a message.
STOP_BUDGET_S = 50
_POLL_S = 0.2
# The wait for a process after `kill_tree`. A hang in a GPU's driver may never end.
_DEATH_S = 1.0
# `docker compose run` delivers each signal twice, about 10 ms apart, and more than 300 ms on a busy
# machine. The second one is ignored.
_ECHO_S = 1.0
# Exit codes that a broken GPU can also cause, as signals can. HARDWARE: CUDA has reported a broken
# GPU, and the watch logs which one.
_SUSPECTS = (ExitCode.UNEXPECTED, ExitCode.HARDWARE, ExitCode.NETWORK, ExitCode.PREEMPTED)
# Exit codes of a job of which the kernel has killed a process because memory was used up.
_OF_A_KILL = (ExitCode.UNEXPECTED, ExitCode.NETWORK, -signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class Child:
    """What the supervised child is, in messages, and how it stops.

    Attributes:
        name: such as "the training".
        stopping: what the child does after the signal {signal}.
        again: what the same command does after that.
        forwarded_as: the signals that the child gets instead of another one, each at one more
            signal to this process. The signal after the last of them kills the child.
        stop_codes: the exit codes that mean "stopped" if the child got a signal.
        memory: what the user can lower if the host's memory is used up.
        ended_by: the message if the signal with this number has ended the child. It had no handler
            yet, so nothing is lost. A script may have none at any time.
    """

    name: str
    stopping: str
    again: str
    forwarded_as: Mapping[signal.Signals, tuple[signal.Signals, ...]]
    stop_codes: frozenset[int] = frozenset()
    memory: str = "--batch-size or --workers"
    ended_by: Callable[[int], str] = stopped_without_loss


# Before the trainer has a handler, Python turns SIGINT into a traceback. The trainer therefore gets
# another signal, which it treats as SIGINT.
_TO_TRAINER = {signal.SIGINT: (signal.SIGUSR2,)}
TRAINING = Child(
    "the training",
    "saving a checkpoint, then stopping",
    "the same command resumes from the newest checkpoint, if there is one",
    _TO_TRAINER,
)
# Its checkpoints do not remain, as in `verify` and `bench`.
UNSAVED_TRAINING = Child(
    "the training", "stopping", "the same command starts it again", _TO_TRAINER
)
EVALUATION = Child("the evaluation", "stopping", "the same command starts it again", _TO_TRAINER)
PREDICTION = Child("the prediction", "stopping", "the same command starts it again", _TO_TRAINER)
# Any program of a user. Most exit with code 0 after they have saved, or are ended by the signal. At
# Ctrl-C, a script may do what it likes, such as end its training early and test the model.
SCRIPT_RUN = Child(
    "the script",
    f"the script gets {{signal}} and has {STOP_BUDGET_S} s to save and exit",
    "the same command starts it again in the same run folder",
    dict.fromkeys(STOP_SIGNALS, (signal.SIGTERM,))
    | {signal.SIGINT: (signal.SIGINT, signal.SIGTERM)},
    frozenset([ExitCode.SUCCESS, ExitCode.PREEMPTED, 128 + signal.SIGTERM]),
    "the script's batch size or number of workers",
)
# A sweep over a user's script, which itself forwards the signal to the running trials.
SCRIPT_SWEEP = Child(
    "the sweep",
    "the running scripts get SIGTERM and have 40 s to save and exit",
    "the same command resumes the sweep",
    _TO_TRAINER,
)


class Ending(NamedTuple):
    """The end of the child.

    Attributes:
        code: the exit code of this process.
        signalled: whether this process got a signal to stop the child.
        left: the number of processes that the child left behind. They would be orphans and hold the
            GPUs, so they were killed.
    """

    code: int
    signalled: bool
    left: int = 0


class _Fault(NamedTuple):
    """Why this process stops the child, and its exit code then."""

    what: str
    code: ExitCode


class HardwareWatch(Protocol):
    """Monitoring of the hardware while the child runs."""

    def fatal(self) -> str | None:
        """Return why the child must save and stop, or None. Return at once."""

    def final_check(self) -> str | None:
        """Return the same after the child has ended. This call may wait for some seconds."""


def supervise(
    argv: Sequence[str],
    env: Mapping[str, str],
    stop_budget_s: float = STOP_BUDGET_S,
    watch: HardwareWatch | None = None,
    kind: Child = TRAINING,
    on_start: Callable[[], None] = lambda: None,
    received: list[int] | None = None,
    hung: Callable[[], str | None] = lambda: None,
    work: Path | None = None,
) -> Ending:
    """Start `argv` as a child, wait for it, and return the exit code of this process.

    The child starts in the folder `work`, or in the current one.

    The first SIGTERM, SIGINT, SIGUSR1 or SIGHUP is forwarded, and the child saves and stops. A
    second signal kills the child, or a third one after the Ctrl-C of a script, and so does the end
    of `stop_budget_s`. If signal N kills the child, the code is 128 + N, as in a shell.

    A fatal fault that `watch` reports stops the child in the same way. The code is then 3
    (hardware), unless the child finished. A hang that `hung` reports stops the child as well, and
    the code is 7. If the kernel has killed a process of the child because memory was used up, the
    code is 5.

    `on_start` is called when the child runs. It may start threads, which end before the next call
    of this function. A caller that starts several children one after the other passes the same
    list `received` each time, so that a signal between them is not lost.
    """
    received = [] if received is None else received
    received_at = 0.0

    def note(number: int, _frame: FrameType | None) -> None:
        nonlocal received_at
        now = time.monotonic()
        if not received or now - received_at > _ECHO_S:
            received.append(number)
            received_at = now

    for number in heeded_stop_signals():
        signal.signal(number, note)
    if received:
        return Ending(ExitCode.PREEMPTED, signalled=True)
    memory = memory_of_cgroups()
    adopt_orphans()
    child = start_child(
        argv,
        # Without a fixed hash seed, Python orders sets of strings differently at each start.
        env={"PYTHONHASHSEED": "0", **env, **({"PWD": str(work)} if work else {})},
        cwd=work,
        # A terminal's Ctrl-C then reaches this process only, and the ranks get the signal once.
        start_new_session=True,
    )
    on_start()
    # The signals for the child, those that it has got, and the signals to this process before them.
    signals: tuple[signal.Signals, ...] = ()
    sent, heard, deadline, fault = list[signal.Signals](), 0, 0.0, None
    while True:
        try:
            code = child.wait(timeout=_POLL_S)
            code = _exit_code(code, sent, watch, fault, kind, memory)
            return Ending(code, bool(received), kill_tree(os.getpid()))
        except subprocess.TimeoutExpired:
            pass
        fault = fault or _fault(watch, None if received else hung)
        if not (received or fault):
            continue
        if not sent:
            number = signal.Signals(received[0]) if received else signal.SIGTERM
            signals, heard = kind.forwarded_as.get(number, (number,)), len(received)
            deadline = time.monotonic() + stop_budget_s
        again = len(received) - heard
        if len(sent) <= again < len(signals):
            # The signal comes first, because a paused terminal delays the message.
            forward_signal(child.pid, signals[again])
            sent.append(signals[again])
            # A later signal may have arrived meanwhile.
            cause = received[heard + again - 1] if received else None
            name = f"{signal.Signals(cause).name} received" if cause else ""
            once_more = "stop" if again + 1 == len(signals) else f"send {signals[again + 1].name}"
            message(
                f"{name or (fault and fault.what)}: {kind.stopping.format(signal=sent[-1].name)} "
                f"(send {'it again' if name else 'a signal'} to {once_more} at once)"
            )
        elif again >= len(signals) or time.monotonic() > deadline:
            why = (
                f"{'third' if len(signals) > 1 else 'second'} signal"
                if again
                else f"not stopped {stop_budget_s:.0f} s after the signal"
            )
            # The kill comes first as well.
            _kill(child)
            message(f"{why}: killed; {kind.again}")
            code = 128 + (received[-1] if again else signal.SIGKILL)
            code = fault.code if fault else code
            return Ending(code, bool(received), kill_tree(os.getpid()))


def _fault(watch: HardwareWatch | None, hung: Callable[[], str | None] | None) -> _Fault | None:
    if watch and watch.fatal():
        return _Fault("the hardware failed", ExitCode.HARDWARE)
    return _Fault(found, ExitCode.NETWORK) if hung and (found := hung()) else None


def _exit_code(
    code: int,
    sent: Collection[signal.Signals],
    watch: HardwareWatch | None,
    fault: _Fault | None,
    kind: Child,
    memory: list[CgroupMemory],
) -> int:
    """Return this process's exit code for the child's `code`. The child got the signals `sent`.

    If a GPU failed, the code is 3 (hardware) instead of that of a crash or a stop. After a hang, it
    is 7 unless the child finished. `memory` is that of the cgroups before the start.
    """
    if code in _OF_A_KILL and (used_up := used_up_since(memory, memory_of_cgroups())):
        message(
            f"{used_up}, so the kernel has killed a process: raise the limit, or lower "
            f"{kind.memory}"
        )
        return ExitCode.MEMORY
    by_signal = -code in {*STOP_SIGNALS, *sent}
    has_finished = code == ExitCode.SUCCESS and signal.SIGINT in sent
    if sent and not has_finished and (by_signal or code in kind.stop_codes):
        if by_signal:
            message(kind.ended_by(-code))
        code = ExitCode.PREEMPTED
    finished = code in (ExitCode.SUCCESS, ExitCode.WRONG_USE)
    looks_broken = code in _SUSPECTS or signal_of(shell_code(code)) is not None
    if not finished and fault:
        return fault.code
    if not finished and watch and looks_broken and watch.final_check():
        return ExitCode.HARDWARE
    if code < 0:
        message(f"{kind.name} was killed by {signal_name(-code)}: {kind.again}")
    return shell_code(code)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the child with its descendants, such as torchrun's ranks."""
    kill_tree(child.pid)
    try:
        child.wait(timeout=_DEATH_S)
    except subprocess.TimeoutExpired:
        message(
            f"process {child.pid} cannot be killed: it hangs in the kernel, most likely in the "
            "GPU's driver"
        )
