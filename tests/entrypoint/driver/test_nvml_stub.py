"""The NVML stub answers as NVML does.

The tests start real processes with the real pynvml, and inject faults while they run.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.nvml_stub.build import build_stub, read_profile, stub_env, write_config
from tests.support.paths import SUPPORT

MIB = 1024 * 1024
# The answers of calls that fail.
UNINITIALIZED, INVALID, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, TIMEOUT, LOST = (
    {"error": number} for number in (1, 2, 3, 4, 6, 10, 15)
)
VERSION_MISMATCH, UNKNOWN = {"error": 25}, {"error": 999}

# The program evaluates one line of Python at a time, and prints the value or the NVML error as a
# line of JSON.
CHILD = """
import ctypes, json, sys
from pynvml import *

gpu = nvmlDeviceGetHandleByIndex
def mig(i, j): return nvmlDeviceGetMigDeviceHandleByIndex(gpu(i), j)
def fields(i, *ids):
    values = nvmlDeviceGetFieldValues(gpu(i), ids)
    return [(v.nvmlReturn, v.valueType, v.value.sllVal) for v in values]
def sram(i, **given):
    status = c_nvmlEccSramErrorStatus_v1_t()
    for name in given: setattr(status, name, given[name])
    nvmlDeviceGetSramEccErrorStatus(gpu(i), ctypes.byref(status))
    return status
def fabric(i, info):
    nvmlDeviceGetGpuFabricInfoV(gpu(i), ctypes.byref(info))
    return info
def sizes():
    class Size(ctypes.Structure):
        _fields_ = [("name", ctypes.c_char_p), ("size", ctypes.c_size_t)]
    rows = (Size * 64).in_dll(ctypes.CDLL("libnvidia-ml.so.1"), "nvml_stub_sizes")
    names = {}
    for row in rows:
        if row.name is None:
            return names
        names[row.name.decode()] = [row.size, ctypes.sizeof(globals()[row.name.decode()])]

def plain(value):
    if isinstance(value, (ctypes.Structure, nvmlFriendlyObject)):
        names = vars(value)
        if isinstance(value, ctypes.Structure):
            names = [name for name, *_ in value._fields_]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, ctypes.Array):
        return list(value)
    if isinstance(value, ctypes._Pointer):
        return nvmlDeviceGetIndex(value)
    return value

for line in sys.stdin:
    try:
        answer = {"value": plain(eval(line))}
    except NVMLError as error:
        answer = {"error": error.value}
    print(json.dumps(answer, default=plain), flush=True)
"""


class Nvml:
    """A process that has loaded the stub through pynvml."""

    def __init__(self, library: Path, config: Path) -> None:
        self.config = config
        env = {**os.environ, **stub_env(library.parent, config)}
        command, pipe = [sys.executable, "-c", CHILD], subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def send(self, expression: str) -> None:
        self.stdin.write(expression + "\n")
        self.stdin.flush()

    def answers(self, within_s: float) -> bool:
        return bool(select.select([self.stdout], [], [], within_s)[0])

    def receive(self) -> dict[str, Any]:
        assert self.answers(10), "no answer in 10 s"
        answer: dict[str, Any] = json.loads(self.stdout.readline())
        return answer

    def __call__(self, expression: str) -> Any:
        self.send(expression)
        answer = self.receive()
        assert "error" not in answer, f"{expression}: {answer}"
        return answer["value"]

    def answer(self, expression: str) -> Any:
        """Return the value of the expression, or `{"error": number}`."""
        self.send(expression)
        received = self.receive()
        return received.get("value", received)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(library: Path, tmp_path: Path) -> Iterator[Callable[..., Nvml]]:
    """Start processes: each call writes the file and, unless `init` is False, calls nvmlInit."""
    with ExitStack() as stack:

        def start(profile: str, keys: dict[str, object] | None = None, init: bool = True) -> Nvml:
            nvml = Nvml(library, write_config(tmp_path / "nvml.conf", profile, keys))
            stack.callback(nvml.close)
            if init:
                nvml("nvmlInit()")
            return nvml

        yield start


# Name, count, memory, and compute capability. Other values of a profile have tests of the health
# rules that they make NA.
PROFILES = {
    "geforce": ("NVIDIA GeForce RTX 3080", 2, 10240, [8, 6]),
    "t4": ("Tesla T4", 1, 15360, [7, 5]),
    "v100": ("Tesla V100-SXM2-32GB", 4, 32768, [7, 0]),
    "a100": ("NVIDIA A100-SXM4-80GB", 4, 81920, [8, 0]),
    "a100-mig": ("NVIDIA A100-SXM4-80GB", 1, None, [8, 0]),
    "h100": ("NVIDIA H100 80GB HBM3", 8, 81559, [9, 0]),
    "h100-mig": ("NVIDIA H100 80GB HBM3", 2, None, [9, 0]),
    "b200": ("NVIDIA B200", 8, 183359, [10, 0]),
    "old-driver": ("Tesla V100-SXM2-32GB", 4, 32768, [7, 0]),
}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_answers_as_its_gpu_does(start: Callable[..., Nvml], profile: str) -> None:
    name, count, memory_mib, capability = PROFILES[profile]
    nvml = start(profile)
    every = "for i in range(nvmlDeviceGetCount())"
    expected = {
        f"[nvmlDeviceGetName(gpu(i)) {every}]": [name] * count,
        f"[nvmlDeviceGetMemoryInfo(gpu(i)).total {every}]": NO_PERMISSION
        if memory_mib is None
        else [memory_mib * MIB] * count,
        "nvmlDeviceGetCudaComputeCapability(gpu(0))": capability,
    }
    assert {call: nvml.answer(call) for call in expected} == expected
    energy = nvml.answer("nvmlDeviceGetTotalEnergyConsumption(gpu(0))")
    assert (energy == NOT_SUPPORTED) == (profile == "geforce" or profile.endswith("-mig"))
    # Readers have another call for each of these.
    second_memory = nvml.answer("nvmlDeviceGetMemoryInfo(gpu(0), nvmlMemory_v2)")
    reasons = nvml.answer("nvmlDeviceGetCurrentClocksEventReasons(gpu(0))")
    is_old = [second_memory, reasons] == [{"error": 13}] * 2
    assert is_old == (profile == "old-driver")


def test_every_profile_is_tested() -> None:
    files = (SUPPORT / "nvml_stub" / "profiles").glob("*.conf")
    assert {file.stem for file in files} == set(PROFILES)


def test_struct_sizes_are_those_of_pynvml(start: Callable[..., Nvml]) -> None:
    sizes = start("h100")("sizes()")
    assert len(sizes) == 11
    assert [name for name, (ours, theirs) in sizes.items() if ours != theirs] == []


# A profile, its changed keys, and the answer to each call. Tests of `trainbox health` and of the
# plan show the other values, which they read.
ANSWERS: dict[str, tuple[str, dict[str, object], dict[str, Any]]] = {
    "values": (
        "h100",
        {
            "gpu1.memory_used_mib": 1000,
            "gpu1.memory_reserved_mib": 559,
            "gpu1.pci_bus_id": "0001:a3:02.0",
            "gpu1.utilization.gpu": 97,
            "gpu1.utilization.memory": 41,
            "gpu1.energy_mj": 2**40,
            "gpu1.pcie.replays": 12,
            "gpu1.processes": "4242:512,77:3",
            "gpu1.ecc.volatile.corrected": 11,
            "gpu1.ecc.aggregate.corrected": 13,
            "gpu1.ecc.aggregate.uncorrected": 14,
            "gpu1.remapped_rows.uncorrected": 22,
        },
        {
            "nvmlSystemGetNVMLVersion()": "13.580.95.05",
            "nvmlErrorString(77)": "NVML error 77 (stub)",
            "nvmlDeviceGetMemoryInfo(gpu(1))": {
                "total": 81559 * MIB,
                "free": 80000 * MIB,
                "used": 1559 * MIB,
            },
            "nvmlDeviceGetMemoryInfo(gpu(1), nvmlMemory_v2)": {
                "version": 0x02000028,
                "total": 81559 * MIB,
                "reserved": 559 * MIB,
                "free": 80000 * MIB,
                "used": 1000 * MIB,
            },
            "nvmlDeviceGetPciInfo(gpu(1))": {
                "busIdLegacy": "0001:A3:02.0",
                "domain": 1,
                "bus": 0xA3,
                "device": 2,
                "pciDeviceId": 0x233010DE,
                "pciSubSystemId": 0,
                "busId": "00000001:A3:02.0",
            },
            "len({nvmlDeviceGetPciInfo(gpu(i)).busId for i in range(8)})": 8,
            "nvmlDeviceGetUtilizationRates(gpu(1))": {"gpu": 97, "memory": 41},
            "nvmlDeviceGetTotalEnergyConsumption(gpu(1))": 2**40,
            "nvmlDeviceGetPcieReplayCounter(gpu(1))": 12,
            "nvmlDeviceGetSerial(gpu(1))": "1654321000000",
            "[(p.pid, p.usedGpuMemory) for p in nvmlDeviceGetComputeRunningProcesses(gpu(1))]": [
                [4242, 512 * MIB],
                [77, 3 * MIB],
            ],
            "[nvmlDeviceGetTotalEccErrors(gpu(1), type, counter) for counter in (0, 1) for "
            "type in (0, 1)]": [11, 0, 13, 14],
            "nvmlDeviceGetRemappedRows(gpu(1))": [0, 22, 0, 0],
        },
    ),
    "instances of slices": (
        "a100-mig",
        {"gpu0.mig1.compute_instance": 1, "gpu0.mig2.gpu_instance": None},
        {
            "[nvmlDeviceGetGpuInstanceId(mig(0, j)) for j in range(3)]": [2, 3, 3],
            "[nvmlDeviceGetComputeInstanceId(mig(0, j)) for j in range(3)]": [0, 1, 0],
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig(0, 2))": 0,
            "nvmlDeviceGetTemperature(mig(0, 0), 0)": NOT_SUPPORTED,
        },
    ),
    "fields fail separately": (
        "h100",
        {"gpu0.field.230": 4, "gpu0.field.60": 1 << 40, "gpu0.ret.field.91": 15},
        {
            "fields(0, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, "
            "NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT, 60)": [
                *([0, 1, 4], [0, 5, -8], [0, 3, 1 << 40])
            ],
            "[error for error, *_ in fields(0, 60, 91, 9)]": [0, 15, 3],
        },
    ),
    "links": (
        "h100",
        {
            "gpu2.nvlink3.replay": 1,
            "gpu2.nvlink3.recovery": 2,
            "gpu2.nvlink3.crc_flit": 3,
            "gpu2.nvlink3.crc_data": 4,
            "gpu2.nvlink3.ecc_data": 5,
            "gpu2.fabric.state": 2,
            "gpu2.fabric.clique": 7,
        },
        {
            "[nvmlDeviceGetNvLinkErrorCounter(gpu(2), 3, c) for c in range(5)]": [1, 2, 3, 4, 5],
            "nvmlDeviceGetNvLinkErrorCounter(gpu(2), 4, 0)": 0,
            "[fabric(i, c_nvmlGpuFabricInfo_v2_t()).state for i in (0, 2)]": [3, 2],
            "fabric(2, c_nvmlGpuFabricInfo_v3_t()).cliqueId": 7,
        },
    ),
    "mistakes": (
        "h100-mig",
        {
            "gpu.nvlinks": 18,
            "gpu.nvlink.replay": 0,
            "gpu0.temperature": "warm",
            "gpu1.ret.handle": 15,
        },
        {
            "gpu(99)": INVALID,
            "nvmlDeviceGetName(c_nvmlDevice_t())": INVALID,
            "nvmlDeviceGetTemperature(gpu(0), 0)": UNKNOWN,
            "nvmlDeviceGetTemperature(gpu(0), 1)": INVALID,
            "nvmlDeviceGetTemperatureThreshold(gpu(0), 4)": INVALID,
            "nvmlDeviceGetTotalEccErrors(gpu(0), 2, 0)": INVALID,
            "nvmlDeviceGetTotalEccErrors(gpu(0), 0, 2)": INVALID,
            "nvmlDeviceGetRetiredPages(gpu(0), 2)": INVALID,
            "nvmlDeviceGetNvLinkErrorCounter(gpu(0), 18, 0)": INVALID,
            "nvmlDeviceGetNvLinkErrorCounter(gpu(0), 0, 5)": INVALID,
            "mig(0, 8)": INVALID,
            "nvmlDeviceGetMigDeviceHandleByIndex(mig(0, 0), 0)": INVALID,
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu(0))": INVALID,
            "nvmlDeviceGetGpuInstanceId(gpu(0))": INVALID,
            "nvmlDeviceGetComputeInstanceId(gpu(0))": INVALID,
            "nvmlDeviceGetHandleByUUID('GPU-1')": NOT_FOUND,
            "nvmlDeviceGetHandleByUUID('GPU-00000000-0000-0000-0000-000000000001')": LOST,
            "nvmlDeviceGetHandleByUUID('MIG-00000000-0000-0000-0000-000000000007')": NOT_FOUND,
            "nvmlDeviceGetPciInfo(mig(0, 0))": NOT_SUPPORTED,
            "nvmlDeviceRegisterEvents(mig(0, 0), 8, nvmlEventSetCreate())": NOT_SUPPORTED,
            "nvmlDeviceGetMemoryInfo(mig(0, 0), 0x01000028)": VERSION_MISMATCH,
            "sram(0, version=1)": VERSION_MISMATCH,
            "fabric(0, c_nvmlGpuFabricInfo_t())": VERSION_MISMATCH,
        },
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_the_answers_to_calls(start: Callable[..., Nvml], case: str) -> None:
    profile, keys, expected = ANSWERS[case]
    nvml = start(profile, keys)
    assert {call: nvml.answer(call) for call in expected} == expected


# Faults


def test_init_fails_with_the_configured_error(start: Callable[..., Nvml]) -> None:
    nvml = start("h100", {"ret.init": 18}, init=False)
    assert nvml.answer("nvmlInit()") == {"error": 18}
    assert nvml.answer("nvmlDeviceGetCount()") == UNINITIALIZED
    write_config(nvml.config, "h100")
    assert nvml("nvmlInit()") is None
    assert nvml("nvmlDeviceGetCount()") == 8
    assert nvml("[nvmlInit(), nvmlShutdown(), nvmlDeviceGetCount()][2]") == 8, (
        "counted: one shutdown for one init"
    )
    assert nvml("nvmlShutdown()") is None
    assert nvml.answer("nvmlDeviceGetCount()") == UNINITIALIZED


def test_a_gpu_is_lost_while_its_handles_are_held(start: Callable[..., Nvml]) -> None:
    nvml = start("h100-mig")
    assert (
        nvml("[globals().update(whole=gpu(1), slice=mig(1, 2)), nvmlDeviceGetIndex(slice)][1]") == 2
    )
    write_config(nvml.config, "h100-mig", {"gpu1.ret": 15})
    assert [
        nvml.answer(f"nvmlDeviceGetName({handle})") for handle in ("whole", "slice", "gpu(0)")
    ] == [LOST, LOST, "NVIDIA H100 80GB HBM3"]


def test_of_two_lines_the_later_one_counts(start: Callable[..., Nvml]) -> None:
    nvml = start("t4", {"gpu0.temperature": 95})
    with nvml.config.open("a") as file:
        file.write("gpu0.temperature=96\n")
    assert nvml("nvmlDeviceGetTemperature(gpu(0), 0)") == 96


def test_an_xid_becomes_an_event_once(start: Callable[..., Nvml]) -> None:
    nvml = start("h100", {"gpu2.xid": 13})
    register = (
        "[nvmlDeviceRegisterEvents(gpu(i), nvmlEventTypeXidCriticalError, events) for i "
        "in range(8)]"
    )
    nvml(f"[globals().update(events=nvmlEventSetCreate()), {register}][1]")
    assert nvml.answer("nvmlEventSetWait(events, 30)") == TIMEOUT, "an Xid from before is not news"
    nvml.send("nvmlEventSetWait(events, 5000)")
    assert not nvml.answers(0.1)
    write_config(nvml.config, "h100", {"gpu2.xid": "13,79,79", "gpu0.xid": 31})
    whole_gpu = 0xFFFFFFFF
    instance = {"gpuInstanceId": whole_gpu, "computeInstanceId": whole_gpu}
    assert nvml.receive()["value"] == {"device": 0, "eventType": 8, "eventData": 31, **instance}
    assert [nvml("nvmlEventSetWait(events, 5000).eventData") for _ in range(2)] == [79, 79]
    assert nvml.answer("nvmlEventSetWait(events, 30)") == TIMEOUT
    for key in ("gpu2.ret", "gpu2.ret.event_wait"):
        write_config(nvml.config, "h100", {key: 15})
        assert nvml.answer("nvmlEventSetWait(events, 30)") == LOST
    assert nvml("nvmlEventSetFree(events)") is None
    old = start("old-driver")
    assert old.answer(f"[globals().update(events=nvmlEventSetCreate()), {register}]") == (
        NOT_SUPPORTED
    )


def test_a_missing_configuration_is_refused(start: Callable[..., Nvml]) -> None:
    nvml = start("h100")
    nvml.config.unlink()
    assert nvml.answer("nvmlDeviceGetCount()") == UNKNOWN


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="no NVML stub profile 'h1000'; there are: a100, a100-mig, b200"
    ):
        read_profile("h1000")


def test_without_a_compiler_the_reason_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="needs a C compiler: cc is not on PATH"):
        build_stub(tmp_path)
