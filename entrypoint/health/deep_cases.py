"""The tests of --deep: the programs to start, and findings from the lines that they print. Pure."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from entrypoint.health.limits import SOURCES, Limits
from entrypoint.health.verdict import Finding, Result
from trainbox.errors import signal_name
from trainbox.processes.environment import LaunchFacts
from trainbox.processes.programs import SELFTEST, TORCHRUN, command_of

CHECKS = ("deep", "deep-matmul", "deep-memory", "deep-all-reduce")
_ALONE, _TOGETHER = ("matmul", "memory"), ("all-reduce",)
_UNITS = {"matmul": ("TFLOP/s", 1e12), "memory": ("GB/s", 1e9), "all-reduce": ("GB/s", 1e9)}
_LIMITS = {
    "matmul": (
        "within the error bound of float32, the same bits each time",
        "Higham, Accuracy and Stability of Numerical Algorithms, section 3.1",
    ),
    "memory": ("all values right", "Trainbox"),
    "all-reduce": ("all values right", "Trainbox"),
}
_FEWEST_TO_COMPARE = 3
_LONGEST_FAULT = 300


@dataclass(frozen=True)
class Device:
    """A GPU or a MIG slice, or a CPU process, whose `uuid` is empty."""

    label: str
    uuid: str = ""
    name: str = ""

    @property
    def is_slice(self) -> bool:
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True)
class Probe:
    """The test of one child process: a device alone, or the exchange between several."""

    devices: tuple[Device, ...]

    @property
    def tests(self) -> tuple[str, ...]:
        """The names of the tests, in order."""
        return _ALONE if len(self.devices) == 1 else _TOGETHER

    @property
    def on_gpus(self) -> bool:
        return bool(self.devices[0].uuid)

    @property
    def name(self) -> str:
        """The devices as text: `GPU 0`, `GPU 0 and 1`, `CPU processes 0, 1 and 2`."""
        *others, last = [device.label for device in self.devices]
        kind = "GPU" if self.on_gpus else "CPU processes" if others else "CPU process"
        return f"{kind} {', '.join(others)} and {last}" if others else f"{kind} {last}"

    def finding(
        self,
        test: str,
        result: Result,
        read: str,
        limit: str = "",
        source: str = "",
        action: str = "",
    ) -> Finding:
        """Return a finding on the devices; on the node if they are CPU processes."""
        found = Finding(f"deep-{test}", result, read, limit, source, action)
        if not self.on_gpus:
            return replace(found, read=f"{self.name}: {read}")
        gpu = "+".join(device.label for device in self.devices)
        return replace(
            found, gpu=gpu, uuid=self.devices[0].uuid if len(self.devices) == 1 else None
        )


@dataclass(frozen=True)
class Reading:
    """The result of one test of a probe; `speed` in FLOP/s or bytes/s, None if it failed."""

    probe: Probe
    test: str
    finding: Finding
    speed: float | None = None

    @property
    def line(self) -> str:
        """The line that is printed while the tests run."""
        if self.finding.result is Result.PASS and self.speed is not None:
            return f"{self.test} {self.probe.name}: {in_unit(self.test, self.speed)}, right"
        # The finding of CPU processes names them in its own text.
        where = f"{self.probe.name}: " if self.probe.on_gpus else ""
        return f"{self.test} {where}{self.finding.read}"


def devices_of(gpus: Sequence[Mapping[str, Any]], processes: int) -> tuple[Device, ...]:
    """Return a verdict's `gpus` as devices; if it has none, the CPU processes."""
    if not gpus:
        return tuple(Device(str(number)) for number in range(processes))
    return tuple(Device(gpu["gpu"], gpu["uuid"], gpu["name"]) for gpu in gpus)


def exchanges(devices: Sequence[Device]) -> list[Probe]:
    """Return a probe for each pair, then one for all devices if there are more than two.

    MIG slices are left out: a CUDA process can use only one of them.
    """
    whole = tuple(device for device in devices if not device.is_slice)
    pairs = [Probe(pair) for pair in combinations(whole, 2)]
    return [*pairs, Probe(whole)] if len(whole) > 2 else pairs


def argv_of(probe: Probe) -> list[str]:
    """Return the command of a probe; each of several devices has a rank."""
    if len(probe.devices) == 1:
        return command_of(SELFTEST, "compute")
    ranks = (
        f"--nproc-per-node={len(probe.devices)}",
        "-m",
        "--",
        SELFTEST.module,
        "exchange",
    )
    return command_of(TORCHRUN, "--standalone", *ranks)


def env_of(probe: Probe, environment: Mapping[str, str], cpus: int) -> dict[str, str]:
    """Return the child's environment; `cpus` is the number of CPUs that this process may use."""
    # PET_NNODES and similar names are torchrun's options, which a cluster sets for the job's nodes.
    kept = {name: value for name, value in environment.items() if not name.startswith("PET_")}
    return {
        "OMP_NUM_THREADS": str(max(1, cpus // len(probe.devices))),
        **kept,
        # as in a launch plan
        "CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in probe.devices if device.uuid),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    } | LaunchFacts(device="cuda" if probe.on_gpus else "cpu").variable()


def ended(probe: Probe, out: str, err: str, code: int) -> list[Reading]:
    """Return a reading for each test of a child that exited and printed `out` and `err`."""
    lines = tuple(_parsed(out))
    if code == 0:
        is_complete = all(len(_of(test, lines)) == len(probe.devices) for test in probe.tests)
        return _readings(probe, lines, "" if is_complete else "it exited without a result")
    errors = [
        f"{_prefix(probe, line)}{line['error']}" for line in lines if "error" in line
    ] or err.strip().splitlines()[-1:]
    text = " ".join("; ".join(errors).split())[:_LONGEST_FAULT] or "no output"
    end = f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"
    return _readings(probe, lines, f"{text} ({end})")


def out_of_time(probe: Probe, out: str, deadline_s: float) -> list[Reading]:
    """Return a reading for each test of a child that was killed at the deadline."""
    fault = f"not finished after {deadline_s:g} s: killed"
    return _readings(probe, tuple(_parsed(out)), fault, deadline_s)


def _parsed(out: str) -> Iterable[dict[str, Any]]:
    """Return the lines of the tests: libraries also write to standard output."""
    for line in out.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "rank" in value:
            yield value


def _of(test: str, lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [line for line in lines if line.get("test") == test]


def _prefix(probe: Probe, line: Mapping[str, Any]) -> str:
    """Return `GPU 1: ` if the probe has several devices."""
    return f"{Probe((probe.devices[line['rank']],)).name}: " if len(probe.devices) > 1 else ""


def _readings(
    probe: Probe,
    lines: Sequence[Mapping[str, Any]],
    fault: str,
    killed_after_s: float | None = None,
) -> list[Reading]:
    """Return a reading for each test of the probe, whose processes printed `lines`.

    A `fault`, if it is not empty, is reported with the first test that it interrupted.
    `killed_after_s` is the deadline after which the processes were killed.
    """
    found: list[Reading] = []
    for test in probe.tests:
        own = _of(test, lines)
        is_whole = len(own) == len(probe.devices) and not (fault and test == probe.tests[-1])
        if any(not line["right"] for line in own) or is_whole:
            found.append(_result(probe, test, own))
            continue
        action = "make_room" if not probe.on_gpus else "reset_gpu" if killed_after_s else "ask_host"
        if found and found[-1].speed is None:
            read = "not tested after the failure"
            finding = probe.finding(test, Result.UNKNOWN, read, action=action)
        else:
            limit, source = "exit code 0", "Trainbox"
            if killed_after_s:
                limit, source = f"finished within {killed_after_s:g} s", "--deadline-s"
            finding = probe.finding(test, Result.CRITICAL, fault, limit, source, action)
        found.append(Reading(probe, test, finding))
    return found


def _result(probe: Probe, test: str, lines: Sequence[Mapping[str, Any]]) -> Reading:
    """Return the reading of a test with these results of its processes."""
    limit, source = _LIMITS[test]
    speed = min(float(line["speed"]) for line in lines)
    read, result, action = f"{in_unit(test, speed)}; {lines[0]['detail']}", Result.PASS, ""
    if wrong := [line for line in lines if not line["right"]]:
        read = "WRONG: " + "; ".join(f"{_prefix(probe, line)}{line['detail']}" for line in wrong)
        result = Result.CRITICAL
        action = "drain" if not probe.on_gpus else "reset_gpu" if test in _TOGETHER else "replace"
    return Reading(probe, test, probe.finding(test, result, read, limit, source, action), speed)


def in_unit(test: str, speed: float) -> str:
    """Return a text such as `41.2 GB/s` or `3,012 GB/s`."""
    unit, size = _UNITS[test]
    return f"{speed / size:,.0f} {unit}" if speed >= 100 * size else f"{speed / size:.3g} {unit}"


def findings(found: Sequence[Reading], devices: Sequence[Device], limits: Limits) -> list[Finding]:
    """Return the findings of all readings.

    A device that is slower than similar devices is a WARN. A device without an exchange has a
    finding of its own.
    """
    exchanged = {
        device for reading in found if reading.test in _TOGETHER for device in reading.probe.devices
    }
    alone = [device for device in devices if device not in exchanged]
    return [
        *(_compared(reading, found, limits) for reading in found),
        *(_why_alone(each, devices) for each in alone),
    ]


def _compared(reading: Reading, found: Sequence[Reading], limits: Limits) -> Finding:
    similar = [
        other.speed for other in found if _kind(other) == _kind(reading) and other.speed is not None
    ]
    least, finding = limits.deep_slowest_of_median, reading.finding
    if (
        finding.result is not Result.PASS
        or reading.speed is None
        or len(similar) < _FEWEST_TO_COMPARE
    ):
        return finding
    median = statistics.median(similar)
    if reading.speed >= least * median:
        return finding
    limit = (
        f"{least:g} of {in_unit(reading.test, median)}, the median of {len(similar)} similar ones"
    )
    source = SOURCES["deep_slowest_of_median"]
    return replace(finding, result=Result.WARN, limit=limit, source=source, action="inspect")


def _kind(reading: Reading) -> tuple[str, list[str]]:
    """Return a key of comparable readings: one test on GPUs of the same models."""
    return reading.test, sorted(device.name for device in reading.probe.devices)


def _why_alone(device: Device, devices: Sequence[Device]) -> Finding:
    """Return a finding for a device without an exchange, for --require."""
    probe = Probe((device,))
    if device.is_slice:
        return probe.finding("all-reduce", Result.NA, "CUDA shows a process only one MIG slice")
    if len([each for each in devices if not each.is_slice]) == 1:
        return probe.finding("all-reduce", Result.NA, "no other device to exchange with")
    read = "not tested: its own tests, or the tests of all others, did not finish"
    return probe.finding(
        "all-reduce", Result.UNKNOWN, read, action="ask_host" if probe.on_gpus else "make_room"
    )
