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
NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND = 3, 4, 13

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
def sram(i):
    status = c_nvmlEccSramErrorStatus_v1_t()
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
        answer = {"error": error.value, "kind": type(error).__name__}
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

    def error(self, expression: str) -> int:
        self.send(expression)
        return int(self.receive().get("error", 0))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("nvml"))


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


# The profiles: name, count, memory, compute capability, and the values that each one lacks.

CALLS = {
    "serial": "nvmlDeviceGetSerial(gpu(0))",
    "memory_v2": "nvmlDeviceGetMemoryInfo(gpu(0), nvmlMemory_v2)",
    "utilization": "nvmlDeviceGetUtilizationRates(gpu(0))",
    "energy": "nvmlDeviceGetTotalEnergyConsumption(gpu(0))",
    "threshold": "nvmlDeviceGetTemperatureThreshold(gpu(0), NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)",
    "margin": "nvmlDeviceGetMarginTemperature(gpu(0))",
    "reasons": "nvmlDeviceGetCurrentClocksEventReasons(gpu(0))",
    "older reasons": "nvmlDeviceGetCurrentClocksThrottleReasons(gpu(0))",
    "ecc": "nvmlDeviceGetTotalEccErrors(gpu(0), NVML_MEMORY_ERROR_TYPE_UNCORRECTED, "
    "NVML_VOLATILE_ECC)",
    "sram": "sram(0)",
    "rows": "nvmlDeviceGetRemappedRows(gpu(0))",
    "pages": "nvmlDeviceGetRetiredPages(gpu(0), NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)",
    "pages pending": "nvmlDeviceGetRetiredPagesPendingStatus(gpu(0))",
    "pcie": "nvmlDeviceGetCurrPcieLinkWidth(gpu(0))",
    "nvlink": "nvmlDeviceGetNvLinkState(gpu(0), 0)",
    "nvlink errors": "nvmlDeviceGetNvLinkErrorCounter(gpu(0), 0, NVML_NVLINK_ERROR_DL_REPLAY)",
    "fabric": "fabric(0, c_nvmlGpuFabricInfo_v2_t())",
    "mig": "nvmlDeviceGetMigMode(gpu(0))",
    # Without _v3, 13 is not an NVMLError in pynvml.
    "processes": "nvmlDeviceGetComputeRunningProcesses_v3(gpu(0))",
    "events": "nvmlDeviceGetSupportedEventTypes(gpu(0))",
}
PAGES, ROWS, LINKS = {"pages", "pages pending"}, {"sram", "rows"}, {"nvlink", "nvlink errors"}
DESKTOP = PAGES | ROWS | LINKS | {"serial", "margin", "ecc", "fabric", "mig", "energy"}
MIG_ON = PAGES | LINKS | {"utilization", "rows", "fabric", "energy"}
PROFILES: dict[str, tuple[str, int, int, list[int], set[str]]] = {
    "geforce": ("NVIDIA GeForce RTX 3080", 2, 10240, [8, 6], DESKTOP),
    "t4": ("Tesla T4", 1, 15360, [7, 5], ROWS | LINKS | {"margin", "fabric", "mig"}),
    "v100": ("Tesla V100-SXM2-32GB", 4, 32768, [7, 0], ROWS | {"margin", "fabric", "mig"}),
    "a100": ("NVIDIA A100-SXM4-80GB", 4, 81920, [8, 0], PAGES | {"margin"}),
    "a100-mig": ("NVIDIA A100-SXM4-80GB", 1, 81920, [8, 0], MIG_ON | {"margin"}),
    "h100": ("NVIDIA H100 80GB HBM3", 8, 81559, [9, 0], PAGES),
    "h100-mig": ("NVIDIA H100 80GB HBM3", 2, 81559, [9, 0], MIG_ON),
    "b200": ("NVIDIA B200", 8, 183359, [10, 0], PAGES | {"threshold", "nvlink errors"}),
    "old-driver": ("Tesla V100-SXM2-32GB", 4, 32768, [7, 0], {"rows", "mig", "events"}),
}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_answers_as_its_gpu_does(start: Callable[..., Nvml], profile: str) -> None:
    name, count, memory_mib, capability, absent = PROFILES[profile]
    nvml = start(profile)
    every = "for i in range(nvmlDeviceGetCount())"
    assert nvml(f"[nvmlDeviceGetName(gpu(i)) {every}]") == [name] * count
    if profile.endswith("-mig"):
        assert nvml.error("nvmlDeviceGetMemoryInfo(gpu(0))") == NO_PERMISSION
    else:
        memory = nvml(f"[nvmlDeviceGetMemoryInfo(gpu(i)).total {every}]")
        assert memory == [memory_mib * MIB] * count
    uuids = [f"GPU-00000000-0000-0000-0000-{i:012d}" for i in range(count)]
    assert nvml(f"[nvmlDeviceGetUUID(gpu(i)) {every}]") == uuids
    assert nvml(f"[nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID(u)) for u in {uuids}]") == list(
        range(count)
    )
    assert nvml("nvmlDeviceGetCudaComputeCapability(gpu(0))") == capability
    assert nvml.error(f"gpu({count})") == 2

    missing = (
        {"memory_v2", "processes", "reasons", "margin", "sram", "fabric"}
        if profile == "old-driver"
        else set()
    )
    expected = {
        call: FUNCTION_NOT_FOUND if call in missing else NOT_SUPPORTED for call in absent | missing
    } | ({"memory_v2": NO_PERMISSION} if profile.endswith("-mig") else {})
    errors = {call: nvml.error(expression) for call, expression in CALLS.items()}
    assert {call: error for call, error in errors.items() if error} == expected
    assert nvml("fields(0, 230)")[0][0] == (NOT_SUPPORTED if profile == "old-driver" else 0)


def test_every_profile_is_tested() -> None:
    files = (SUPPORT / "nvml_stub" / "profiles").glob("*.conf")
    assert {file.stem for file in files} == set(PROFILES)


def test_the_versions_name_the_stub(start: Callable[..., Nvml]) -> None:
    nvml = start("h100")
    assert nvml("nvmlSystemGetDriverVersion()") == "580.95.05 (stub)"
    assert nvml("nvmlSystemGetCudaDriverVersion_v2()") == 13000
    assert nvml("nvmlSystemGetNVMLVersion()") == "13.580.95.05"
    assert nvml("nvmlErrorString(77)") == "NVML error 77 (stub)"


def test_struct_sizes_are_those_of_pynvml(start: Callable[..., Nvml]) -> None:
    sizes = start("h100")("sizes()")
    assert len(sizes) == 11
    assert [name for name, (ours, theirs) in sizes.items() if ours != theirs] == []


# MIG


def test_mig_slices_are_separate_devices(start: Callable[..., Nvml]) -> None:
    nvml = start(
        "a100-mig",
        {"gpu0.mig1.compute_instance": 1, "gpu0.mig2.gpu_instance": None, "gpu0.mig_pending": 0},
    )
    assert nvml("nvmlDeviceGetMigMode(gpu(0))") == [1, 0]
    assert nvml("nvmlDeviceGetMaxMigDeviceCount(gpu(0))") == 7
    slices = [("3g.40gb", 40192), ("2g.20gb", 19968), ("1g.10gb", 9728)]
    names = [f"NVIDIA A100-SXM4-80GB MIG {name}" for name, _ in slices]
    uuids = [f"MIG-00000000-0000-0000-0000-{j:012d}" for j in range(3)]
    assert nvml("[nvmlDeviceGetName(mig(0, j)) for j in range(3)]") == names
    assert nvml("[nvmlDeviceGetMemoryInfo(mig(0, j)).total for j in range(3)]") == [
        mib * MIB for _, mib in slices
    ]
    assert nvml("[nvmlDeviceGetUUID(mig(0, j)) for j in range(3)]") == uuids
    assert nvml("[nvmlDeviceGetGpuInstanceId(mig(0, j)) for j in range(3)]") == [2, 3, 3]
    assert nvml("[nvmlDeviceGetComputeInstanceId(mig(0, j)) for j in range(3)]") == [0, 1, 0]
    assert nvml.error("mig(0, 3)") == 6
    assert nvml(f"nvmlDeviceGetName(nvmlDeviceGetHandleByUUID({uuids[1]!r}))") == names[1]
    assert nvml(
        "nvmlDeviceGetUUID(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig(0, 2)))"
    ).startswith("GPU-")
    assert nvml.error("nvmlDeviceGetTemperature(mig(0, 0), 0)") == NOT_SUPPORTED


def test_slices_of_two_gpus_have_different_uuids(start: Callable[..., Nvml]) -> None:
    nvml = start("h100-mig", {"gpu1.mig6.memory_mib": ""})
    uuids = nvml(
        "[nvmlDeviceGetUUID(mig(i, j)) for i, j in [(0, j) for j in range(7)] + [(1, j) "
        "for j in range(6)]]"
    )
    assert len(set(uuids)) == 13
    assert nvml("nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig(1, 5))") == 1
    assert nvml.error("mig(1, 6)") == 6


def test_a_gpu_without_mig_has_no_slices(start: Callable[..., Nvml]) -> None:
    nvml = start("h100")
    assert nvml("nvmlDeviceGetMigMode(gpu(0))") == [0, 0]
    assert nvml("nvmlDeviceGetMaxMigDeviceCount(gpu(0))") == 0
    assert nvml.error("mig(0, 0)") == 6
    assert nvml.error("nvmlDeviceGetGpuInstanceId(gpu(0))") == 2


# Values


def test_values_reach_the_caller(start: Callable[..., Nvml]) -> None:
    """Every number is different, so that no two can be swapped."""
    nvml = start(
        "h100",
        {
            "gpu1.uuid": "GPU-abc",
            "gpu1.memory_used_mib": 1000,
            "gpu1.memory_reserved_mib": 559,
            "gpu1.pci_bus_id": "0001:a3:02.0",
            "gpu1.utilization.gpu": 97,
            "gpu1.utilization.memory": 41,
            "gpu1.temperature": 66,
            "gpu1.power_mw": 699123,
            "gpu1.energy_mj": 2**40,
            "gpu1.clocks_event_reasons": "0x48",
            "gpu1.pcie.width": 8,
            "gpu1.pcie.generation": 2,
            "gpu1.pcie.replays": 12,
            "gpu1.persistence_mode": 0,
            "gpu1.compute_mode": 3,
            "gpu1.processes": "4242:512,77:3",
        },
    )
    assert nvml("nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID('GPU-abc'))") == 1
    memory = nvml("nvmlDeviceGetMemoryInfo(gpu(1))")
    assert memory == {"total": 81559 * MIB, "free": 80000 * MIB, "used": 1559 * MIB}
    second = nvml("nvmlDeviceGetMemoryInfo(gpu(1), nvmlMemory_v2)")
    assert {
        **memory,
        "used": 1000 * MIB,
        "reserved": 559 * MIB,
        "version": second["version"],
    } == second
    assert nvml.error("nvmlDeviceGetMemoryInfo(gpu(1), 0x01000028)") == 25
    pci = nvml("nvmlDeviceGetPciInfo(gpu(1))")
    assert (pci["busId"], pci["busIdLegacy"]) == ("00000001:A3:02.0", "0001:A3:02.0")
    assert [pci[key] for key in ("domain", "bus", "device", "pciDeviceId")] == [
        1,
        0xA3,
        2,
        0x233010DE,
    ]
    assert len(set(nvml("[nvmlDeviceGetPciInfo(gpu(i)).busId for i in range(8)]"))) == 8
    assert nvml("nvmlDeviceGetUtilizationRates(gpu(1))") == {"gpu": 97, "memory": 41}
    assert nvml("nvmlDeviceGetTemperature(gpu(1), NVML_TEMPERATURE_GPU)") == 66
    assert nvml("nvmlDeviceGetPowerUsage(gpu(1))") == 699123
    assert nvml("nvmlDeviceGetTotalEnergyConsumption(gpu(1))") == 2**40
    assert nvml("nvmlDeviceGetCurrentClocksEventReasons(gpu(1))") == 0x48
    assert nvml("nvmlDeviceGetCurrentClocksThrottleReasons(gpu(1))") == 0x48
    assert nvml("[nvmlDeviceGetTemperatureThreshold(gpu(1), i) for i in range(4)]") == [
        92,
        89,
        95,
        87,
    ]
    assert nvml("nvmlDeviceGetMarginTemperature(gpu(1))") == 51
    pcie = "[f(gpu(1)) for f in (nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth)]"
    assert nvml(pcie) == [8, 16]
    assert nvml(pcie.replace("Width", "Generation")) == [2, 5]
    assert nvml("nvmlDeviceGetPcieReplayCounter(gpu(1))") == 12
    assert nvml("nvmlDeviceGetPersistenceMode(gpu(1))") == 0
    assert nvml("nvmlDeviceGetComputeMode(gpu(1))") == 3
    assert nvml("nvmlDeviceGetSerial(gpu(1))") == "1654321000000"
    assert nvml("nvmlDeviceGetVbiosVersion(gpu(1))") == "96.00.89.00.01"
    assert nvml("nvmlDeviceGetInforomImageVersion(gpu(1))") == "G520.0200.00.05"
    processes = nvml("nvmlDeviceGetComputeRunningProcesses(gpu(1))")
    assert [(process["pid"], process["usedGpuMemory"]) for process in processes] == [
        (4242, 512 * MIB),
        (77, 3 * MIB),
    ]
    assert nvml("nvmlDeviceGetComputeRunningProcesses(gpu(0))") == []


def test_a_gpu_that_shares_the_host_memory_reports_none(start: Callable[..., Nvml]) -> None:
    nvml = start("b200", {"gpu.memory_mib": None})
    assert (
        nvml(
            "nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID("
            f"'GPU-{'0' * 8}-0000-0000-0000-{'0' * 11}3'))"
        )
        == 3
    )
    assert nvml.error("nvmlDeviceGetMemoryInfo(gpu(3))") == NOT_SUPPORTED


def test_fields_fail_separately(start: Callable[..., Nvml]) -> None:
    nvml = start("h100", {"gpu0.field.230": 4, "gpu0.field.60": 1 << 40, "gpu0.ret.field.91": 15})
    values = nvml(
        "fields(0, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, "
        "NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT, 60, 91, 9)"
    )
    assert values[:3] == [[0, 1, 4], [0, 5, -8], [0, 3, 1 << 40]]
    assert [error for error, *_ in values] == [0, 0, 0, 15, NOT_SUPPORTED]


def test_errors_of_memory(start: Callable[..., Nvml]) -> None:
    nvml = start(
        "a100",
        {
            "gpu0.ecc.volatile.corrected": 11,
            "gpu0.ecc.volatile.uncorrected": 12,
            "gpu0.ecc.aggregate.corrected": 13,
            "gpu0.ecc.aggregate.uncorrected": 14,
            "gpu0.sram.threshold_exceeded": 1,
            "gpu0.remapped_rows.corrected": 21,
            "gpu0.remapped_rows.uncorrected": 22,
            "gpu0.remapped_rows.pending": 1,
            "gpu0.remapped_rows.failed": 0,
            "gpu1.retired_pages.single_bit": 2,
            "gpu1.retired_pages.double_bit": 63,
            "gpu1.retired_pages.pending": 1,
        },
    )
    ecc = (
        "[nvmlDeviceGetTotalEccErrors(gpu(0), type, counter) for counter in (0, 1) for "
        "type in (0, 1)]"
    )
    assert nvml(ecc) == [11, 12, 13, 14]
    assert nvml("[sram(i).bThresholdExceeded for i in (0, 1)]") == [1, 0]
    assert nvml("nvmlDeviceGetRemappedRows(gpu(0))") == [21, 22, 1, 0]
    assert nvml("[len(nvmlDeviceGetRetiredPages(gpu(1), cause)) for cause in (0, 1)]") == [2, 63]
    assert nvml("nvmlDeviceGetRetiredPagesPendingStatus(gpu(1))") == 1


def test_errors_of_links(start: Callable[..., Nvml]) -> None:
    counters = ("replay", "recovery", "crc_flit", "crc_data", "ecc_data")
    keys = {f"gpu2.nvlink3.{counter}": number for number, counter in enumerate(counters, 1)}
    fabric = {
        "gpu2.fabric.state": 2,
        "gpu2.fabric.summary": 5,
        "gpu2.fabric.status": 6,
        "gpu2.fabric.clique": 7,
    }
    nvml = start("h100", {**keys, **fabric, "gpu2.fabric.mask": 8, "gpu2.nvlink5.state": 0})
    assert (
        nvml("[nvmlDeviceGetNvLinkState(gpu(2), link) for link in range(18)]")
        == [1] * 5 + [0] + [1] * 12
    )
    assert nvml(
        "[nvmlDeviceGetNvLinkErrorCounter(gpu(2), 3, counter) for counter in range(5)]"
    ) == [1, 2, 3, 4, 5]
    assert nvml("nvmlDeviceGetNvLinkErrorCounter(gpu(2), 4, 0)") == 0
    assert nvml.error("nvmlDeviceGetNvLinkState(gpu(2), 18)") == 2
    assert nvml("[fabric(i, c_nvmlGpuFabricInfo_v2_t()).state for i in (0, 2)]") == [3, 2]
    third = nvml("fabric(2, c_nvmlGpuFabricInfo_v3_t())")
    assert third.pop("clusterUuid") == [0] * 16
    assert list(third.values()) == [0x03000028, 6, 7, 2, 8, 5]


# Faults


def test_init_fails_with_the_configured_error(start: Callable[..., Nvml]) -> None:
    nvml = start("h100", {"ret.init": 18}, init=False)
    nvml.send("nvmlInit()")
    assert nvml.receive() == {"error": 18, "kind": "NVMLError_LibRmVersionMismatch"}
    assert nvml.error("nvmlDeviceGetCount()") == 1
    write_config(nvml.config, "h100")
    assert nvml("nvmlInit()") is None
    assert nvml("nvmlDeviceGetCount()") == 8
    assert nvml("[nvmlInit(), nvmlShutdown(), nvmlDeviceGetCount()][2]") == 8, (
        "counted: one shutdown for one init"
    )
    assert nvml("nvmlShutdown()") is None
    assert nvml.error("nvmlDeviceGetCount()") == 1


def test_init_hangs_until_the_key_is_gone(start: Callable[..., Nvml]) -> None:
    nvml = start("h100", {"hang.init": 1}, init=False)
    # The test then waits for nvmlInit, not for the start of Python.
    assert nvml("1 + 1") == 2
    nvml.send("nvmlInit()")
    assert not nvml.answers(0.4)
    write_config(nvml.config, "h100")
    assert nvml.receive() == {"value": None}


def test_one_gpu_is_lost_and_the_others_answer(start: Callable[..., Nvml]) -> None:
    nvml = start("h100-mig", {"gpu1.ret": 15})
    assert nvml("nvmlDeviceGetCount()") == 2
    assert nvml.error("gpu(1)") == 15
    assert nvml.error("nvmlDeviceGetHandleByUUID('GPU-00000000-0000-0000-0000-000000000001')") == 15
    assert nvml("nvmlDeviceGetName(gpu(0))") == "NVIDIA H100 80GB HBM3"


def test_a_gpu_is_lost_while_its_handles_are_held(start: Callable[..., Nvml]) -> None:
    nvml = start("h100-mig")
    assert (
        nvml("[globals().update(whole=gpu(1), slice=mig(1, 2)), nvmlDeviceGetIndex(slice)][1]") == 2
    )
    write_config(nvml.config, "h100-mig", {"gpu1.ret": 15})
    assert [
        nvml.error(f"nvmlDeviceGetName({handle})") for handle in ("whole", "slice", "gpu(0)")
    ] == [15, 15, 0]


def test_one_call_fails_on_one_gpu(start: Callable[..., Nvml]) -> None:
    nvml = start(
        "h100", {"gpu1.ret.temperature": 4, "gpu.ret.power_mw": 999, "gpu2.ret.power_mw": 0}
    )
    assert [nvml.error(f"nvmlDeviceGetTemperature(gpu({i}), 0)") for i in range(3)] == [0, 4, 0]
    assert [nvml.error(f"nvmlDeviceGetPowerUsage(gpu({i}))") for i in range(3)] == [999, 999, 0]


# The expression that a line `ret.CALL=17` breaks, for every CALL. The process holds handles of a
# GPU and of a slice, and an event set.
EVERY_CALL = {
    "init": "nvmlInit()",
    "shutdown": "nvmlShutdown()",
    "driver": "nvmlSystemGetDriverVersion()",
    "nvml": "nvmlSystemGetNVMLVersion()",
    "cuda": "nvmlSystemGetCudaDriverVersion_v2()",
    "count": "nvmlDeviceGetCount()",
    "name": "nvmlDeviceGetName(held)",
    "uuid": "nvmlDeviceGetUUID(held)",
    "index": "nvmlDeviceGetIndex(held)",
    "serial": "nvmlDeviceGetSerial(held)",
    "vbios": "nvmlDeviceGetVbiosVersion(held)",
    "inforom": "nvmlDeviceGetInforomImageVersion(held)",
    "compute_capability": "nvmlDeviceGetCudaComputeCapability(held)",
    "pci": "nvmlDeviceGetPciInfo(held)",
    "memory": "nvmlDeviceGetMemoryInfo(held)",
    "memory_v2": "nvmlDeviceGetMemoryInfo(held, nvmlMemory_v2)",
    "utilization": "nvmlDeviceGetUtilizationRates(held)",
    "energy_mj": "nvmlDeviceGetTotalEnergyConsumption(held)",
    "temperature": "nvmlDeviceGetTemperature(held, 0)",
    "threshold": "nvmlDeviceGetTemperatureThreshold(held, 0)",
    "margin": "nvmlDeviceGetMarginTemperature(held)",
    "power_mw": "nvmlDeviceGetPowerUsage(held)",
    "persistence_mode": "nvmlDeviceGetPersistenceMode(held)",
    "compute_mode": "nvmlDeviceGetComputeMode(held)",
    "clocks_event_reasons": "nvmlDeviceGetCurrentClocksEventReasons(held)",
    "clocks_throttle_reasons": "nvmlDeviceGetCurrentClocksThrottleReasons(held)",
    "pcie.width": "nvmlDeviceGetCurrPcieLinkWidth(held)",
    "pcie.max_width": "nvmlDeviceGetMaxPcieLinkWidth(held)",
    "clock": "nvmlDeviceGetClockInfo(held, 1)",
    "pcie.generation": "nvmlDeviceGetCurrPcieLinkGeneration(held)",
    "pcie.max_generation": "nvmlDeviceGetMaxPcieLinkGeneration(held)",
    "pcie.replays": "nvmlDeviceGetPcieReplayCounter(held)",
    "field": "nvmlDeviceGetFieldValues(held, [230])",
    "ecc": "nvmlDeviceGetTotalEccErrors(held, 1, 0)",
    "ecc_mode": "nvmlDeviceGetEccMode(held)",
    "ecc.default": "nvmlDeviceGetDefaultEccMode(held)",
    "sram": "sram(0)",
    "remapped_rows": "nvmlDeviceGetRemappedRows(held)",
    "retired_pages": "nvmlDeviceGetRetiredPages(held, 0)",
    "retired_pages.pending": "nvmlDeviceGetRetiredPagesPendingStatus(held)",
    "nvlink.state": "nvmlDeviceGetNvLinkState(held, 0)",
    "nvlink.remote": "nvmlDeviceGetNvLinkRemoteDeviceType(held, 0)",
    "nvlink.errors": "nvmlDeviceGetNvLinkErrorCounter(held, 0, 0)",
    "fabric": "fabric(0, c_nvmlGpuFabricInfo_v2_t())",
    "processes": "nvmlDeviceGetComputeRunningProcesses_v3(held)",
    "mig": "nvmlDeviceGetMigMode(held)",
    "mig_max": "nvmlDeviceGetMaxMigDeviceCount(held)",
    "mig_handle": "[nvmlDeviceGetMigDeviceHandleByIndex(held, 0), 0][1]",
    "mig_parent": "nvmlDeviceGetDeviceHandleFromMigDeviceHandle(slice)",
    "gpu_instance": "nvmlDeviceGetGpuInstanceId(slice)",
    "compute_instance": "nvmlDeviceGetComputeInstanceId(slice)",
    "event_types": "nvmlDeviceGetSupportedEventTypes(held)",
    "event_set": "[nvmlEventSetCreate(), 0][1]",
    "event_register": "nvmlDeviceRegisterEvents(held, 8, events)",
    "event_wait": "nvmlEventSetWait(events, 0)",
    "event_free": "nvmlEventSetFree(events)",
}
UUIDS = [f"{kind}-{'0' * 8}-0000-0000-0000-{'0' * 12}" for kind in ("GPU", "MIG")]
HANDLE_CALLS = ["gpu(0)", "mig(0, 0)", *(f"nvmlDeviceGetHandleByUUID({uuid!r})" for uuid in UUIDS)]


def test_every_call_can_be_made_to_fail(start: Callable[..., Nvml]) -> None:
    nvml = start("h100-mig")
    nvml("globals().update(held=gpu(0), slice=mig(0, 0), events=nvmlEventSetCreate())")
    assert [nvml.error(call) for call in HANDLE_CALLS] == [0] * 4
    write_config(nvml.config, "h100-mig", {"ret.handle": 17})
    assert [nvml.error(call) for call in HANDLE_CALLS] == [17] * 4
    write_config(nvml.config, "h100-mig", {"gpu0.mig0.ret.handle": 17})
    assert [nvml.error(call) for call in HANDLE_CALLS] == [0, 17, 0, 17]
    errors = {}
    for call, expression in EVERY_CALL.items():
        shown = {"gpu.ret.memory": None, "gpu.ret.memory_v2": None}
        write_config(nvml.config, "h100-mig", {f"ret.{call}": 17, **shown})
        errors[call] = nvml.error(expression)
    assert errors == dict.fromkeys(EVERY_CALL, 17)


def test_wrong_arguments_are_refused(start: Callable[..., Nvml]) -> None:
    nvml = start("h100-mig", {"gpu.nvlinks": 18, "gpu.nvlink.replay": 0})
    nvml("globals().update(held=gpu(0), slice=mig(0, 0), null=c_nvmlDevice_t())")
    wrong = [
        "gpu(2)",
        "gpu(99)",
        "nvmlDeviceGetName(null)",
        "nvmlDeviceGetTemperature(held, 1)",
        "nvmlDeviceGetTemperatureThreshold(held, 4)",
        "nvmlDeviceGetTotalEccErrors(held, 2, 0)",
        "nvmlDeviceGetTotalEccErrors(held, 0, 2)",
        "nvmlDeviceGetRetiredPages(held, 2)",
        "nvmlDeviceGetNvLinkErrorCounter(held, 18, 0)",
        "nvmlDeviceGetNvLinkErrorCounter(held, 0, 5)",
        "mig(0, 8)",
        "nvmlDeviceGetMigDeviceHandleByIndex(slice, 0)",
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle(held)",
        "nvmlDeviceGetGpuInstanceId(held)",
        "nvmlDeviceGetComputeInstanceId(held)",
    ]
    assert {expression: nvml.error(expression) for expression in wrong} == dict.fromkeys(wrong, 2)
    assert nvml.error("nvmlDeviceGetHandleByUUID('GPU-1')") == 6
    assert nvml.error("nvmlDeviceGetHandleByUUID('MIG-00000000-0000-0000-0000-000000000007')") == 6
    assert nvml.error("nvmlDeviceGetPciInfo(slice)") == NOT_SUPPORTED
    assert nvml.error("nvmlDeviceRegisterEvents(slice, 8, nvmlEventSetCreate())") == NOT_SUPPORTED
    old = "globals().update(status=c_nvmlEccSramErrorStatus_v1_t()), setattr(status, 'version', 1)"
    assert nvml.error(f"[{old}, nvmlDeviceGetSramEccErrorStatus(held, ctypes.byref(status))]") == 25
    assert (
        nvml.error("nvmlDeviceGetGpuFabricInfoV(held, ctypes.byref(c_nvmlGpuFabricInfo_t()))") == 25
    )


def test_a_value_changes_while_the_process_runs(start: Callable[..., Nvml]) -> None:
    nvml = start("t4")
    assert nvml("nvmlDeviceGetTemperature(gpu(0), 0)") == 36
    write_config(
        nvml.config, "t4", {"gpu0.temperature": 95, "gpu.ecc.volatile.uncorrected": None}, count=3
    )
    assert nvml("nvmlDeviceGetTemperature(gpu(0), 0)") == 95
    assert nvml("nvmlDeviceGetCount()") == 3
    assert nvml.error(CALLS["ecc"]) == NOT_SUPPORTED
    assert nvml.error("nvmlDeviceGetUtilizationRates(gpu(3))") == 2
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
    assert nvml.error("nvmlEventSetWait(events, 30)") == 10, "an Xid from before is not news"
    nvml.send("nvmlEventSetWait(events, 5000)")
    assert not nvml.answers(0.1)
    write_config(nvml.config, "h100", {"gpu2.xid": "13,79,79", "gpu0.xid": 31})
    whole_gpu = 0xFFFFFFFF
    instance = {"gpuInstanceId": whole_gpu, "computeInstanceId": whole_gpu}
    assert nvml.receive()["value"] == {"device": 0, "eventType": 8, "eventData": 31, **instance}
    assert [nvml("nvmlEventSetWait(events, 5000).eventData") for _ in range(2)] == [79, 79]
    assert nvml.error("nvmlEventSetWait(events, 30)") == 10
    for key in ("gpu2.ret", "gpu2.ret.event_wait"):
        write_config(nvml.config, "h100", {key: 15})
        assert nvml.error("nvmlEventSetWait(events, 30)") == 15
    assert nvml("nvmlEventSetFree(events)") is None
    assert (
        start("old-driver").error(f"[globals().update(events=nvmlEventSetCreate()), {register}]")
        == NOT_SUPPORTED
    )


def test_a_missing_symbol_is_reported_as_function_not_found(
    start: Callable[..., Nvml], tmp_path: Path
) -> None:
    library = build_stub(tmp_path / "old", without=["nvmlDeviceGetFieldValues"])
    old = Nvml(library, write_config(tmp_path / "old.conf", "h100"))
    try:
        assert old("(nvmlInit(), nvmlDeviceGetName(gpu(0)))[1]") == "NVIDIA H100 80GB HBM3"
        old.send("fields(0, 230)")
        missing = old.receive()
    finally:
        old.close()
    assert missing == {"error": FUNCTION_NOT_FOUND, "kind": "NVMLError_FunctionNotFound"}
    configured = start("h100", {"ret.field": FUNCTION_NOT_FOUND})
    configured.send("fields(0, 230)")
    assert configured.receive() == missing, "ret.field=13 must look the same"


def test_errors_in_a_configuration_are_refused(start: Callable[..., Nvml]) -> None:
    nvml = start("h100", {"gpu0.temperature": "warm"})
    assert nvml.error("nvmlDeviceGetTemperature(gpu(0), 0)") == 999
    nvml.config.unlink()
    assert nvml.error("nvmlDeviceGetCount()") == 999


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
