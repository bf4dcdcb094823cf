"""The supervisor of a launched process: it forwards signals and passes on the exit code."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol

from entrypoint.launch.children import STOP_BUDGET_S, TRAINING, Child
from entrypoint.launch.stopping import Fault, Kill, Send, Stop
from entrypoint.system.cgroup import CgroupMemory, memory_of_cgroups, used_up_since
from trainbox.errors import (
    ExitCode,
    shell_code,
    signal_of,
)
from trainbox.processes.process_tree import (
    STOP_SIGNALS,
    adopt_orphans,
    forward_signal,
    heeded_stop_signals,
    kill_tree,
    killed_by,
    start_child,
    wait_for_tree,
)
from trainbox.processes.streams import message, stop_waiting_for_readers

_POLL_S = 0.2
# The wait for a process after `kill_tree`. A hang in a GPU's driver may never end.
_DEATH_S = 1.0
# The wait for the processes of a child that has ended by itself. Loader workers end just after
# their parent.
_LAST_S = 1.0
# `docker compose run` delivers each signal twice, about 10 ms apart, and more than 300 ms on a busy
# machine. The second one is ignored.
_ECHO_S = 1.0
# Exit codes that a broken GPU can also cause, as signals can. HARDWARE: CUDA has reported a broken
# GPU, and the watch logs which one.
_SUSPECTS = (ExitCode.UNEXPECTED, ExitCode.HARDWARE, ExitCode.NETWORK, ExitCode.PREEMPTED)
# Exit codes of a job of which the kernel has killed a process because memory was used up.
_OF_A_KILL = (ExitCode.UNEXPECTED, ExitCode.NETWORK, -signal.SIGKILL, 128 + signal.SIGKILL)


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
    failed: Callable[[], Fault | None] = lambda: None,
    work: Path | None = None,
) -> Ending:
    """Start `argv` as a child, wait for it, and return the exit code of this process.

    The child starts in the folder `work`, or in the current one.

    The first SIGTERM, SIGINT, SIGUSR1 or SIGHUP is forwarded, and the child saves and stops. A
    second signal kills the child, or a third one after the Ctrl-C of a script, and so does the end
    of `stop_budget_s`. If signal N kills the child, or stops it before it has saved anything new,
    the code is 128 + N, as in a shell.

    A fatal fault that `watch` reports stops the child in the same way. The code is then 3
    (hardware), unless the child finished. A fault that `failed` reports, such as a hang, stops the
    child as well, and has its own code. If the kernel has killed a process of the child because
    memory was used up, the code is 5.

    `on_start` is called when the child runs. It may start threads, which end before the next call
    of this function. A caller that starts several children one after the other passes the same
    list `received` each time, so that a signal between them is not lost.
    """
    received = [] if received is None else received
    _note_signals(received)
    if received:
        return Ending(128 + received[0], signalled=True)
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
    stop, fault = Stop(kind, stop_budget_s), None
    while (code := _ended(child)) is None:
        fault = fault or _fault(watch, None if received else failed)
        if fault:
            stop_waiting_for_readers()
        # The signal comes first, because the message may wait for its reader.
        match stop.next(received, fault, time.monotonic()):
            case Send(number, text):
                forward_signal(child.pid, number)
                message(text)
            case Kill(code, text):
                _kill(child)
                message(text)
                break
    else:
        # A scheduler may send its signal to the child as well, which then ends first.
        sent = stop.sent or [number for first in received[:1] for number in kind.signals(first)]
        if code >= 0:
            wait_for_tree(os.getpid(), _LAST_S)
        code = _exit_code(code, received, sent, watch, fault, kind, memory)
    return Ending(code, bool(received), kill_tree(os.getpid()))


def _note_signals(received: list[int]) -> None:
    """Add each signal that asks for a stop to `received`, except the echo of another one."""
    received_at_s = 0.0

    def note(number: int, _frame: FrameType | None) -> None:
        nonlocal received_at_s
        stop_waiting_for_readers()
        now_s = time.monotonic()
        if not received or now_s - received_at_s > _ECHO_S:
            received.append(number)
            received_at_s = now_s

    for number in heeded_stop_signals():
        signal.signal(number, note)


def _ended(child: subprocess.Popen[bytes]) -> int | None:
    """Wait for a moment, and return the exit code of the child, or None if it runs."""
    try:
        return child.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _fault(watch: HardwareWatch | None, failed: Callable[[], Fault | None] | None) -> Fault | None:
    if watch and watch.fatal():
        return Fault("the hardware failed", ExitCode.HARDWARE)
    return failed() if failed else None


def _exit_code(
    code: int,
    received: Sequence[int],
    sent: Sequence[signal.Signals],
    watch: HardwareWatch | None,
    fault: Fault | None,
    kind: Child,
    memory: list[CgroupMemory],
) -> int:
    """Return this process's exit code for the child's `code`.

    This process has `received` signals, and the child got the signals `sent`, which may be others.

    If a GPU failed, the code is 3 (hardware) instead of the child's code for a crash or a stop.
    After another fault, the code is the fault's, unless the child finished. `memory` has the
    cgroups' limits and counts of kills before the start.
    """
    if code in _OF_A_KILL and (used_up := used_up_since(memory, memory_of_cgroups())):
        message(
            f"{used_up}, so the kernel has killed a process: raise the limit, or lower "
            f"{kind.memory}"
        )
        return ExitCode.MEMORY
    by_signal = signal_of(shell_code(code)) in {*STOP_SIGNALS, *sent}
    has_finished = code == ExitCode.SUCCESS and signal.SIGINT in sent
    if sent and not has_finished:
        if by_signal and code < 0:
            message(kind.ended_by(-code))
        has_ended = code == ExitCode.SUCCESS and kind.stops_with_0
        if by_signal or has_ended or code == ExitCode.PREEMPTED:
            stopped = 128 + (received or sent)[0]
            code = ExitCode.PREEMPTED if kind.has_saved(code) else stopped
    finished = code in (ExitCode.SUCCESS, ExitCode.WRONG_USE)
    looks_broken = code in _SUSPECTS or signal_of(shell_code(code)) is not None
    if not finished and fault:
        return fault.code
    if not finished and watch and looks_broken and watch.final_check():
        return ExitCode.HARDWARE
    if code < 0:
        message(f"{kind.name} was {killed_by(-code)}: {kind.again}")
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
