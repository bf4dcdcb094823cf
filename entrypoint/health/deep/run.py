"""`trainbox health --deep`: what is only seen by computing and exchanging, each test in a child
with a deadline.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from entrypoint.health.deep.cases import (
    Case,
    Outcome,
    Reading,
    argv_of,
    devices_of,
    ended,
    env_of,
    exchanges,
    findings,
    out_of_time,
    readings,
)
from entrypoint.health.limits import Limits
from entrypoint.health.verdict import Finding, Result, Verdict
from entrypoint.system.cpus import usable_cpus
from entrypoint.system.processes import die_with_parent

# for killed processes to be gone; one that hangs in the driver is not waited for any longer
_END_S = 5.0
_POLL_S = 0.02


def deepened(
    verdict: Verdict,
    limits: Limits,
    processes: int,
    deadline_s: float,
    say: Callable[[str], None],
    look_again: Callable[[], Verdict],
) -> Verdict:
    """A new verdict, and what the tests found on its GPUs; on so many CPU processes where it has
    none.

    `say` gets a line after each test; `look_again` is asked after the last, since load brings out
    Xids, ECC errors and heat. A verdict that is closed comes back with a note that nothing was
    begun.
    """
    if verdict.closing:
        return _with(
            verdict, Finding("deep", Result.INFO, "not begun: what closes the verdict comes first")
        )
    devices, begin_s = devices_of(verdict.gpus, processes), time.monotonic()

    def done(cases: list[Case]) -> Iterator[Reading]:
        for case in cases:
            for reading in readings(_run(case, deadline_s)):
                say(f"deep: {reading.line}")
                yield reading

    alone = list(done([Case((device,)) for device in devices]))
    # An exchange with one that does not end would only wait for the deadline again.
    stuck = {reading.case.devices[0] for reading in alone if reading.speed is None}
    found = [*alone, *done(exchanges([device for device in devices if device not in stuck]))]
    words = f"{len(found)} tests on {Case(devices).place} in {time.monotonic() - begin_s:.0f} s"
    return _with(
        look_again(), Finding("deep", Result.PASS, words), *findings(found, devices, limits)
    )


def _with(verdict: Verdict, *more: Finding) -> Verdict:
    return dataclasses.replace(verdict, findings=(*verdict.findings, *more))


def _run(case: Case, deadline_s: float) -> Outcome:
    child = subprocess.Popen(
        argv_of(case, sys.executable),
        env=env_of(case, os.environ, usable_cpus()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # there are no threads here
        preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
    )
    try:
        out, err = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired as late:
        return out_of_time(case, (late.stdout or b"").decode(errors="replace"), deadline_s)
    finally:
        kill_all(child)
    return ended(case, out.decode(errors="replace"), err.decode(errors="replace"), child.returncode)


def kill_all(child: "subprocess.Popen[bytes]") -> None:
    """End it with all that it has started, which torchrun's ranks, sessions of their own, belong
    to; wait for a moment.
    """
    if child.poll() is not None:
        return
    os.killpg(child.pid, signal.SIGSTOP)  # it starts no more while they are counted
    below = _descendants(child.pid)
    for kill, pid in ((os.killpg, child.pid), *((os.kill, pid) for pid in below)):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    until_s = time.monotonic() + _END_S
    while (
        child.poll() is None or any(_parent(pid) is not None for pid in below)
    ) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    for pipe in (child.stdout, child.stderr):
        if pipe:
            pipe.close()


def _descendants(ancestor: int) -> list[int]:
    """Its children, theirs and so on, as Linux lists them."""
    parents = {int(path.name): _parent(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found = [ancestor]
    for pid in found:  # it grows meanwhile
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _parent(pid: int) -> int | None:
    """None if the process is gone, or a zombie, which only its parent can remove."""
    try:
        state, parent, *_ = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return None
    return None if state in "ZX" else int(parent)
