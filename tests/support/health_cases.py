"""Cases for each rule of `trainbox health`: what the driver reports, and the expected result."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PASS, INFO, NA, WARN, UNKNOWN, CRITICAL = "PASS", "INFO", "NA", "WARN", "UNKNOWN", "CRITICAL"


@dataclass(frozen=True)
class Case:
    """A fault for the NVML stub and the result that one check must give.

    `keys` change `profile`; `result` is the worst result of `check` on any of the two GPUs.
    """

    check: str
    injected: str
    result: str
    code: int = 0
    profile: str = "h100"
    keys: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    limits: str = ""

    def __str__(self) -> str:
        return f"{self.check}-{self.injected}"


# For an old driver's profile, whose CUDA version and whose V100 would close the gate.
NEW_ENOUGH = {"cuda": 13000, "gpu.compute_capability": "8.0"}


def on_gpu_1(
    check: str,
    result: str,
    key: str,
    value: object,
    code: int = 0,
    profile: str = "h100",
    **more: Any,
) -> Case:
    return Case(
        check, f"`gpu1.{key}={value}`", result, code, profile, {f"gpu1.{key}": value}, **more
    )


def _recovery() -> Iterable[Case]:
    for action, result in enumerate(
        [PASS, CRITICAL, CRITICAL, WARN, CRITICAL, CRITICAL, CRITICAL, CRITICAL]
    ):
        yield on_gpu_1("recovery-action", result, "field.230", action, int(result == CRITICAL))
    yield on_gpu_1("recovery-action", WARN, "field.230", 99)
    yield Case("recovery-action", "a driver before 570", NA, profile="old-driver", keys=NEW_ENOUGH)


def _unreadable() -> Iterable[Case]:
    """What sandboxes (gVisor) and virtual GPUs do on healthy hardware: 2 or 999 from a call."""
    closing = {"recovery-action": "field", "ecc-uncorrected": "ecc", "sram-threshold": "sram"}
    closing["row-remap"] = "remapped_rows"
    others = {"slowdown": "clocks_event_reasons", "temperature": "temperature"}
    others |= {"temperature-margin": "margin", "pcie-width": "pcie.width"}
    others |= {"pcie-generation": "pcie.generation", "nvlink": "nvlink.state"}
    others |= {"nvlink-errors": "nvlink.errors", "fabric": "fabric", "inforom": "inforom"}
    others |= {"persistence": "persistence_mode", "compute-mode": "compute_mode"}
    others |= {"processes": "processes", "ecc-mode": "ecc_mode", "memory-in-use": "memory_v2"}
    yield on_gpu_1("ecc-uncorrected", UNKNOWN, "ret.ecc", 2, 1)
    for check, call in (closing | others).items():
        yield on_gpu_1(check, UNKNOWN, f"ret.{call}", 999, int(check in closing))
    yield on_gpu_1("retired-pages", UNKNOWN, "ret.retired_pages", 999, 1, "t4")


# fmt: off
CASES = (
    Case("driver", "no driver, no GPU requested", NA, keys={"ret.init": 9}),
    Case("driver", "no driver, `--gpus 1`", CRITICAL, 1, keys={"ret.init": 9},
     words=("--gpus", "1")),
    Case("count", "2 GPUs, `--gpus 2`", PASS, words=("--gpus", "2")),
    Case("count", "2 GPUs, `--gpus 3`", CRITICAL, 1, words=("--gpus", "3")),
    Case("count", "2 GPUs, `--gpu-ids 0,5`", CRITICAL, 1, words=("--gpu-ids", "0,5")),
    on_gpu_1("unique-uuid", CRITICAL, "uuid", "GPU-00000000-0000-0000-0000-000000000000", 1),
    on_gpu_1("handle", CRITICAL, "ret", 15, 1),
    on_gpu_1("handle", CRITICAL, "ret.temperature", 15, 1),
    on_gpu_1("handle", UNKNOWN, "ret.handle", 999, 1),
    on_gpu_1("handle", UNKNOWN, "ret.handle", 4),
    Case("handle", "`gpu1.ret=15`, `--gpu-ids 0`", PASS, keys={"gpu1.ret": 15},
     words=("--gpu-ids", "0")),
    *_recovery(),
    *_unreadable(),
    on_gpu_1("ecc-uncorrected", CRITICAL, "ecc.volatile.uncorrected", 1, 1),
    on_gpu_1("ecc-uncorrected", PASS, "ecc.volatile.uncorrected", 1, limits="ecc_uncorrected = 1"),
    Case("ecc-uncorrected", "a GPU without ECC, `--require`", UNKNOWN, 1, "geforce",
     words=("--require", "ecc-uncorrected")),
    Case("ecc-uncorrected", "no driver, `--require ecc-uncorrected`", UNKNOWN, 1,
     keys={"ret.init": 9}, words=("--require", "ecc-uncorrected")),
    on_gpu_1("ecc-uncorrected", UNKNOWN, "ret.ecc", 4),
    on_gpu_1("ecc-uncorrected", UNKNOWN, "ret.ecc", 4, 1, words=("--require", "ecc-uncorrected")),
    on_gpu_1("ecc-uncorrected", UNKNOWN, "crash.ecc", 1, 1),
    Case("ecc-uncorrected", "`gpu1.ecc.volatile.uncorrected=1`, `gpu1.crash.temperature=1`",
     CRITICAL, 1, keys={"gpu1.ecc.volatile.uncorrected": 1, "gpu1.crash.temperature": 1}),
    on_gpu_1("sram-threshold", CRITICAL, "sram.threshold_exceeded", 1, 1),
    on_gpu_1("row-remap", PASS, "remapped_rows.corrected", 511),
    on_gpu_1("row-remap", WARN, "remapped_rows.corrected", 512),
    on_gpu_1("row-remap", WARN, "remapped_rows.pending", 1),
    on_gpu_1("row-remap", CRITICAL, "remapped_rows.pending", 1, 1,
     limits='remap_pending = "CRITICAL"'),
    on_gpu_1("row-remap", CRITICAL, "remapped_rows.failed", 1, 1),
    on_gpu_1("retired-pages", PASS, "retired_pages.single_bit", 62, profile="t4"),
    on_gpu_1("retired-pages", CRITICAL, "retired_pages.single_bit", 63, 1, "t4"),
    Case("retired-pages", "`gpu1.retired_pages.single_bit=60`, `double_bit=3`", CRITICAL, 1, "t4",
     {"gpu1.retired_pages.single_bit": 60, "gpu1.retired_pages.double_bit": 3}),
    on_gpu_1("retired-pages", WARN, "retired_pages.pending", 1, profile="t4"),
    on_gpu_1("slowdown", PASS, "clocks_event_reasons", "0x4"),
    on_gpu_1("slowdown", WARN, "clocks_event_reasons", "0x40"),
    on_gpu_1("slowdown", WARN, "clocks_event_reasons", "0x80"),
    Case("slowdown", "reasons with their older name", WARN, 0, "old-driver",
     {"gpu1.clocks_event_reasons": "0x40"} | NEW_ENOUGH),
    on_gpu_1("temperature", PASS, "temperature", 86),
    on_gpu_1("temperature", WARN, "temperature", 87),
    on_gpu_1("temperature", CRITICAL, "temperature", 89, 1),
    on_gpu_1("temperature", WARN, "temperature", 89, limits="shutdown_margin_c = 0"),
    on_gpu_1("temperature-margin", PASS, "margin", -1, profile="b200"),
    on_gpu_1("temperature-margin", WARN, "margin", -2, profile="b200"),
    on_gpu_1("temperature-margin", CRITICAL, "margin", -5, 1, "b200"),
    on_gpu_1("pcie-width", WARN, "pcie.width", 8),
    Case("pcie-generation", "`gpu.pcie.generation=1`, idle", PASS, keys={"gpu.pcie.generation": 1}),
    *(
        Case(
            "pcie-generation",
            f"`gpu1.pcie.generation=4`, `utilization.gpu={load}`",
            result,
            keys={"gpu1.pcie.generation": 4, "gpu1.utilization.gpu": load},
        )
        for load, result in ((49, PASS), (50, WARN))
    ),
    on_gpu_1("nvlink", CRITICAL, "nvlink3.state", 0, 1),
    on_gpu_1("nvlink", WARN, "nvlink3.state", 0, limits='nvlink_inactive = "WARN"'),
    Case("nvlink", "`gpu.nvlink3.state=0`, on both GPUs", CRITICAL, 1,
     keys={"gpu.nvlink3.state": 0}),
    on_gpu_1("nvlink", CRITICAL, "nvlink3.state", 0, 1, "a100"),
    Case("nvlink", "`gpu.nvlink3.state=0`, on both GPUs", WARN, profile="a100",
     keys={"gpu.nvlink3.state": 0}),
    Case("nvlink", "`gpu0.nvlink3.state=0`, `gpu1.nvlink5.state=0`", CRITICAL, 1, "a100",
     {"gpu0.nvlink3.state": 0, "gpu1.nvlink5.state": 0}),
    Case("nvlink", "`gpu1.nvlink3.state=0`, with NVSwitch", CRITICAL, 1, "a100",
     {"gpu.nvlink.remote": 2, "gpu.nvlink3.state": 0}),
    Case(
        "nvlink",
        "`gpu.nvlink3.state=`, a link that the model does not use",
        PASS,
        keys={
            "gpu.nvlink3.state": "",
            "gpu.nvlink.state": "",
            **{f"gpu.nvlink{link}.state": 1 for link in range(18) if link != 3},
        },
    ),
    Case("nvlink", "`gpu1.nvlink3.state=0`, one GPU in use", WARN, keys={"gpu1.nvlink3.state": 0},
     words=("--gpu-ids", "1")),
    on_gpu_1("nvlink", WARN, "nvlink.state", 0, profile="a100"),
    on_gpu_1("nvlink-errors", PASS, "nvlink3.crc_flit", 5000),
    on_gpu_1("nvlink-errors", WARN, "nvlink3.replay", 1),
    on_gpu_1("nvlink-errors", WARN, "nvlink3.recovery", 1),
    on_gpu_1("fabric", CRITICAL, "fabric.state", 2, 1),
    on_gpu_1("fabric", CRITICAL, "fabric.status", 999, 1),
    Case("fabric", "`gpu1.fabric.state=1`, one GPU in use", INFO, keys={"gpu1.fabric.state": 1},
     words=("--gpu-ids", "1")),
    on_gpu_1("fabric", PASS, "fabric.mask", "0x1AA"),
    on_gpu_1("fabric", WARN, "fabric.mask", "0x1A9"),
    on_gpu_1("fabric", WARN, "fabric.mask", "0x1A6"),
    on_gpu_1("fabric", CRITICAL, "fabric.mask", "0x19A", 1),
    on_gpu_1("fabric", WARN, "fabric.mask", "0x16A"),
    on_gpu_1("fabric", CRITICAL, "fabric.mask", "0x2AA", 1),
    on_gpu_1("fabric", PASS, "fabric.summary", 1),
    on_gpu_1("fabric", CRITICAL, "fabric.summary", 2, 1),
    on_gpu_1("fabric", WARN, "fabric.summary", 3),
    Case("fabric", "`gpu.fabric.state=0`, no NVSwitch", NA, keys={"gpu.fabric.state": 0}),
    on_gpu_1("inforom", WARN, "ret.inforom", 14),
    Case("inforom", "a version that is not UTF-8", UNKNOWN, keys={"gpu1.inforom": "G520\udcff"}),
    on_gpu_1("persistence", WARN, "persistence_mode", 0),
    on_gpu_1("compute-mode", CRITICAL, "compute_mode", 2, 1),
    on_gpu_1("compute-mode", WARN, "compute_mode", 3),
    Case("compute-mode", "`gpu1.compute_mode=3`, a program on the GPU", CRITICAL, 1,
     keys={"gpu1.compute_mode": 3, "gpu1.processes": "4242:100"}),
    Case("compute-mode", "`gpu1.compute_mode=3`, a hidden program on the GPU", CRITICAL, 1,
     keys={"gpu1.compute_mode": 3, "gpu1.memory_used_mib": 2000}),
    on_gpu_1("mig", WARN, "mig_pending", 1),
    on_gpu_1("ecc-mode", WARN, "ecc.mode", 0),
    on_gpu_1("ecc-mode", WARN, "ecc.mode_pending", 0),
    Case("ecc-mode", "off by default, as on workstations", PASS,
     keys={"gpu.ecc.mode": 0, "gpu.ecc.default": 0}),
    on_gpu_1("memory-in-use", PASS, "memory_used_mib", 1024),
    on_gpu_1("memory-in-use", WARN, "memory_used_mib", 1025),
    on_gpu_1("memory-in-use", PASS, "memory_used_mib", 1025, limits="memory_in_use_mib = 2000"),
    Case("memory-in-use", "an old driver, which adds what it reserves", PASS, profile="old-driver",
     keys=NEW_ENOUGH),
    on_gpu_1("processes", WARN, "processes", "4242:100,4243:5"),
    on_gpu_1("architecture", PASS, "compute_capability", "7.5"),
    on_gpu_1("architecture", CRITICAL, "compute_capability", "6.1", 1),
    Case("architecture", "not reported", NA, keys={"gpu.compute_capability": ""}),
    on_gpu_1("same-name", WARN, "name", "NVIDIA H100 PCIe"),
    on_gpu_1("same-vbios", WARN, "vbios", "96.00.89.00.02"),
    Case("cpus", "`--processes 1`", PASS, words=("--processes", "1")),
    Case("cpus", "`--processes 9999`", WARN, words=("--processes", "9999")),
    Case("shm", "limit `0`", PASS, limits="shm_mib_per_process = 0"),
    Case("shm", "limit `1e12`", WARN, limits="shm_mib_per_process = 1e12"),
    Case("memory", "limit `0`", PASS, limits="memory_mib_per_process = 0"),
    Case("memory", "limit `1e12`", WARN, limits="memory_mib_per_process = 1e12"),
    Case("disk", "limit `0`", PASS, limits="disk_mib = 0"),
    Case("disk", "limit `1e12`", WARN, limits="disk_mib = 1e12"),
    Case("output", "`--runs-dir /dev/null`", CRITICAL, 1, words=("--runs-dir", "/dev/null")),
    Case("cuda", "`cuda=14000`", PASS, keys={"cuda": 14000}),
    Case("cuda", "`cuda=12080`", CRITICAL, 1, keys={"cuda": 12080}),
    Case("cuda", "`ret.cuda=999`", UNKNOWN, 1, keys={"ret.cuda": 999}),
)
# fmt: on
# The checks that are NA on a healthy machine of each kind. All others are PASS, except WARN for
# what is switched off on a desktop.
# fmt: off
_NOT_APPLICABLE = {
    "geforce": "ecc-uncorrected sram-threshold row-remap retired-pages temperature-margin nvlink "
               "nvlink-errors fabric mig ecc-mode",
    "t4": "sram-threshold row-remap temperature-margin nvlink nvlink-errors fabric mig",
    "v100": "sram-threshold row-remap temperature-margin fabric mig",
    "a100": "retired-pages temperature-margin fabric",
    "a100-mig": "pcie-generation row-remap retired-pages temperature-margin nvlink nvlink-errors "
                "fabric memory-in-use",
    "h100": "retired-pages",
    "h100-mig": "pcie-generation row-remap retired-pages nvlink nvlink-errors fabric memory-in-use",
    "b200": "retired-pages temperature nvlink-errors",
    "old-driver": "recovery-action sram-threshold row-remap temperature-margin fabric mig "
                  "processes",
}
# fmt: on
PROFILES = {kind: set(checks.split()) for kind, checks in _NOT_APPLICABLE.items()}
