"""`trainbox health --deep`: tests that compute and communicate, each in a child with a deadline."""

import dataclasses
import os
import subprocess
import time
from collections.abc import Callable, Iterator

from entrypoint.health.deep_cases import (
    Probe,
    Reading,
    argv_of,
    devices_of,
    ended,
    env_of,
    exchanges,
    findings,
    out_of_time,
)
from entrypoint.health.limits import Limits
from entrypoint.health.verdict import Finding, Result, Verdict
from entrypoint.system.cgroup import usable_cpus
from trainbox.processes.process_tree import kill_tree, start_child


def deepened(
    verdict: Verdict,
    limits: Limits,
    processes: int,
    deadline_s: float,
    report: Callable[[str], None],
    examine_again: Callable[[], Verdict],
) -> Verdict:
    """Test the verdict's GPUs, or `processes` CPU processes if it has none.

    Return a new verdict with the findings of the tests. A closed verdict is returned without tests.
    `report` gets a line after each test. `examine_again` is called after the last test, since load
    reveals Xids, ECC errors and overheating.
    """
    if verdict.closing:
        return _with(
            verdict, Finding("deep", Result.INFO, "not started: fix the failed checks first")
        )
    devices, begin_s = devices_of(verdict.gpus, processes), time.monotonic()

    def done(cases: list[Probe]) -> Iterator[Reading]:
        for probe in cases:
            for reading in _run(probe, deadline_s):
                report(f"deep: {reading.line}")
                yield reading

    alone = list(done([Probe((device,)) for device in devices]))
    # An exchange with a device that did not finish would only wait for the deadline again.
    stuck = {reading.probe.devices[0] for reading in alone if reading.speed is None}
    found = [*alone, *done(exchanges([device for device in devices if device not in stuck]))]
    summary = f"{len(found)} tests on {Probe(devices).name} in {time.monotonic() - begin_s:.0f} s"
    return _with(
        examine_again(), Finding("deep", Result.PASS, summary), *findings(found, devices, limits)
    )


def _with(verdict: Verdict, *more: Finding) -> Verdict:
    return dataclasses.replace(verdict, findings=(*verdict.findings, *more))


def _run(probe: Probe, deadline_s: float) -> list[Reading]:
    child = start_child(
        argv_of(probe),
        env=env_of(probe, os.environ, usable_cpus()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired as late:
        return out_of_time(probe, (late.stdout or b"").decode(errors="replace"), deadline_s)
    finally:
        kill_tree(child.pid)
        child.poll()
        for pipe in (child.stdout, child.stderr):
            if pipe:
                pipe.close()
    return ended(
        probe, out.decode(errors="replace"), err.decode(errors="replace"), child.returncode
    )
