"""The report of `trainbox doctor` as text. Pure.

The headings and indented rows keep their form when they are pasted into an issue.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from entrypoint.doctor.redaction import Hidden, redacted, shown_environment
from entrypoint.doctor.surroundings import Place, Surroundings
from entrypoint.driver.gpus import Gpu
from entrypoint.health.screen import closing_line
from entrypoint.health.verdict import Finding, Result, Verdict, by_weight

_TOLD = (Result.CRITICAL, Result.UNKNOWN, Result.WARN)
_NETWORK = (
    "nfs",
    "nfs4",
    "lustre",
    "cifs",
    "smb3",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "afs",
    "9p",
    "virtiofs",
    "panfs",
)
_DOCKERS_RIGHTS = "00000000a80425fb"
_MIB_PER_GIB = 1024
_LONGEST_TROUBLE = 800  # characters; the remedy at the end must not be cut off
_NEEDED = re.compile(r"nvidia(?:ctl|-uvm|\d+)")  # devices for computing; others are for screens

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class DriverSays:
    """The answers of the NVIDIA driver.

    `gpus` are all GPUs that it lists. `visible` are those that CUDA_VISIBLE_DEVICES selects.
    """

    words: str
    there: bool
    gpus: tuple[Gpu, ...] = ()
    visible: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class TorchSays:
    """The answers of torch, as trainer/checks/torch_info.py prints them.

    `fault` is why there is no answer. `error` is why torch or CUDA does not start.
    """

    fault: str = ""
    error: str = ""
    warnings: Sequence[str] = ()
    file: str = ""
    version: str = ""
    cuda: str | None = None
    cudnn: int | None = None
    nccl: str = ""
    libcuda: str = ""
    count: int = 0
    names: Sequence[str] = ()
    mps: bool = False


@dataclass(frozen=True)
class Examination:
    """All values of a report."""

    taken_at: str
    verdict: Verdict
    driver: DriverSays
    torch: TorchSays
    around: Surroundings
    env: Mapping[str, str]
    hidden: Hidden


def report(seen: Examination) -> str:
    """Return the whole report. Private text is removed from each value of another program."""
    sections = {
        "versions": list(seen.around.software.items()),
        "GPUs": _gpus(seen),
        "runtime": _runtime(seen.around),
        "mounts and disk": [(place.name, _place_words(place)) for place in seen.around.places],
        "limits": _limits(seen.around),
    }
    lines = [
        f"trainbox doctor, {seen.taken_at}. Names, home folders and what looks like a secret are "
        "left out; read it before you paste it.",
        "",
        "## verdict",
        closing_line(seen.verdict),
        *(f"- {line}" for line in findings_told(seen.verdict.findings, seen.hidden)),
        *(f"- {redacted(line, seen.hidden, _LONGEST_TROUBLE)}" for line in troubles(seen)),
    ]
    for title, rows in sections.items():
        lines += _section(title, [(name, redacted(value, seen.hidden)) for name, value in rows])
    return "\n".join([*lines, *_section("environment", shown_environment(seen.env, seen.hidden))])


def findings_told(findings: Iterable[Finding], hidden: Hidden) -> list[str]:
    """Return a line for each finding that did not pass. GPUs with the same finding share a line."""
    alike: dict[Finding, list[str]] = {}
    for finding in by_weight([finding for finding in findings if finding.result in _TOLD]):
        alike.setdefault(dataclasses.replace(finding, gpu=None, uuid=None), []).append(
            finding.gpu or ""
        )
    merged = (
        dataclasses.replace(
            finding, gpu=",".join(gpus) or None, read=redacted(finding.read, hidden)
        )
        for finding, gpus in alike.items()
    )
    return [
        dataclasses.replace(finding, limit=redacted(finding.limit, hidden)).line
        for finding in merged
    ]


def troubles(seen: Examination) -> list[str]:
    """Return the problems that no check of the verdict covers, each with its remedy."""
    around = seen.around
    told = [difference(seen), *seen.torch.warnings]
    if not seen.driver.there and (around.kernel_module or around.pci_gpus):
        told.append(_gpus_not_given(around))
    if around.own_name_fault:
        told.append(
            f"this machine's own name cannot be looked up ({around.own_name_fault}), and "
            "torchrun's processes connect by it: add it to /etc/hosts (docker run: leave out "
            "--network none, or add --add-host)"
        )
    return [line for line in told if line]


def difference(seen: Examination) -> str:
    """Return the likely reason why torch does not see the visible GPUs, or "" if it does."""
    its, driver, visible = seen.torch, seen.driver, len(seen.driver.visible)
    if its.fault:
        return f"torch {its.fault}"
    if not its.version:
        return f"torch cannot be used: {its.error}"
    if its.count == visible:
        return ""
    left = "" if visible == len(driver.gpus) else f", CUDA_VISIBLE_DEVICES leaves {visible}"
    counts = (
        f"driver sees {len(driver.gpus)} GPU{'s' if len(driver.gpus) != 1 else ''}{left}, torch "
        f"sees {its.count}"
    )
    return f"{counts}: {_reason(seen)}"


def _reason(seen: Examination) -> str:
    its, visible, devices = seen.torch, seen.driver.visible, seen.around.devices
    too_old = any(
        finding.check == "cuda" and finding.result is Result.CRITICAL
        for finding in seen.verdict.findings
    )
    closed = [
        f"/dev/{name}"
        for name, access in devices.items()
        if _NEEDED.fullmatch(name) and access != "rw"
    ]
    reasons = {
        "trainbox plans by the driver's list, which a container has by "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility": (its.count > len(visible)),
        f"torch {its.version} is built without CUDA; install what requirements.lock pins": its.cuda
        is None,
        "CUDA shows a process only one MIG slice, so this is correct": (
            its.count == 1 and any(gpu.mig_index is not None for gpu in visible)
        ),
        f"this driver is too old for torch's CUDA {its.cuda}; see above": too_old,
        f"CUDA's part of the driver is missing ({its.libcuda}); a container gets it by --gpus all "
        "and NVIDIA_DRIVER_CAPABILITIES=compute,utility, a host by the driver's package "
        "libcuda1": its.libcuda,
        f"this user may not read and write {' '.join(closed)}; give it the right, or the container "
        "the device": closed,
        "/dev/nvidia-uvm is missing; give the container that device, or load the host's module "
        "nvidia_uvm": (devices and "nvidia-uvm" not in devices and "dxg" not in devices),
        "CUDA may read CUDA_VISIBLE_DEVICES differently; unset it and run this again": (
            "CUDA_VISIBLE_DEVICES" in seen.env
        ),
        f"{its.error or 'no reason given'}; recreate the container, and see `nvidia-smi` in it and "
        "on the host": True,
    }
    return next(text for text, applies in reasons.items() if applies)


def _gpus_not_given(around: Surroundings) -> str:
    if not around.kernel_module:
        return (
            f"{around.pci_gpus} NVIDIA GPU(s) on the PCI bus and no driver loaded: install the "
            "driver on the host"
        )
    inside = (
        "this container has no access to it: start it with --gpus all (it needs "
        "nvidia-container-toolkit on the host)"
    )
    missing = (
        "its libraries are missing: install the driver's packages for programs, such as "
        "libnvidia-compute"
    )
    return (
        f"the host runs NVIDIA driver {around.kernel_module} and "
        f"{inside if around.signs else missing}"
    )


def _gpus(seen: Examination) -> Rows:
    its, driver = seen.torch, seen.driver
    versions = [f"CUDA {its.cuda}" if its.cuda else "without CUDA"]
    versions += [f"cuDNN {its.cudnn}"] if its.cudnn else []
    versions += [f"NCCL {its.nccl}"] if its.nccl else []
    rows = [
        ("driver", driver.words),
        ("kernel module", seen.around.kernel_module or "not loaded here"),
    ]
    rows += [
        ("CUDA", finding.read)
        for finding in seen.verdict.findings
        if finding.check == "cuda" and finding.result is Result.PASS
    ]
    rows += [
        (_span([gpu.label for gpu in group]), words)
        for words, group in groupby(driver.gpus, _gpu_words)
    ]
    rows += [("memory in use", used)] if (used := _memory_in_use(seen.verdict)) else []
    rows += [
        (
            "torch",
            ", ".join([its.version, *versions, *["Apple GPU"] * its.mps])
            if its.version
            else "no answer",
        )
    ]
    if its.file and not its.file.startswith(seen.around.python_prefix):
        rows.append(("torch's place", f"{its.file}, which is not in this Python's own folder"))
    rows.append(
        (
            "seen",
            f"by the driver {len(driver.gpus)}, visible {len(driver.visible)}, by torch "
            f"{its.count}",
        )
    )
    rows += (
        [(f"torch's {index}", name) for index, name in enumerate(its.names)]
        if _other_names(seen)
        else []
    )
    if its.error and (driver.there or not its.version):
        rows.append(("torch says", its.error))
    return rows


def _memory_in_use(verdict: Verdict) -> str:
    used = [
        (
            str(gpu["gpu"]),
            f"{gpu['memory_used_mib']:,} MiB" if "memory_used_mib" in gpu else "unknown",
        )
        for gpu in verdict.gpus
    ]
    groups = groupby(used, lambda pair: pair[1])
    return ", ".join(f"{_span([label for label, _ in group])}: {words}" for words, group in groups)


def _other_names(seen: Examination) -> bool:
    return sorted(seen.torch.names) != sorted(gpu.name for gpu in seen.driver.visible)


def _gpu_words(gpu: Gpu) -> str:
    return f"{gpu.name}, {gpu.memory_mib:,} MiB{f': {gpu.fault}' if gpu.fault else ''}"


def _span(labels: Sequence[str]) -> str:
    return f"GPU {labels[0]}" if len(labels) == 1 else f"GPU {labels[0]} to {labels[-1]}"


def _runtime(around: Surroundings) -> Rows:
    groups = f", groups {' '.join(map(str, around.groups))}" if around.groups else ""
    named = "" if around.has_passwd_entry else ", no passwd entry"
    effective, seccomp = (
        around.rights.get("CapEff", "unknown"),
        around.rights.get("Seccomp", "unknown"),
    )
    rights = {"0" * 16: "none", _DOCKERS_RIGHTS: "Docker's usual"}.get(effective, effective)
    nodes: dict[str, list[str]] = {}
    for name, access in around.devices.items():
        nodes.setdefault(access or "no access", []).append(name)
    name = "looked up, a loopback address" if around.own_name_loopback else "looked up"
    return [
        (
            "inside",
            ", ".join(around.signs) or "no container and no scheduler detected",
        ),
        ("user", f"uid {around.uid}, gid {around.gid}{groups}{named}"),
        ("capabilities", rights),
        (
            "no new privileges",
            {"0": "off", "1": "on"}.get(around.rights.get("NoNewPrivs", ""), "unknown"),
        ),
        ("seccomp", {"0": "off", "1": "strict", "2": "filter"}.get(seccomp, seccomp)),
        (
            "/dev",
            "; ".join(f"{access}: {' '.join(names)}" for access, names in nodes.items())
            or "no nvidia*",
        ),
        ("PCI bus", f"{around.pci_gpus} NVIDIA GPU(s)"),
        ("own host name", around.own_name_fault or name),
    ]


def _place_words(place: Place) -> str:
    there = (
        place.path
        if place.path == place.found
        else f"{place.path} is missing; would be in {place.found}"
    )
    remote = ", over the network" if place.file_system in _NETWORK else ""
    remote = ", through a program" if place.file_system.startswith("fuse") else remote
    access = (
        "read-only"
        if place.read_only
        else "writable"
        if place.writable
        else "not writable by this user"
    )
    return (
        f"{there}: {place.file_system}{remote}, {access}, {_size(place.free_mib)} free of "
        f"{_size(place.total_mib)}"
    )


def _limits(around: Surroundings) -> Rows:
    memory = "unknown" if around.memory_mib is None else _size(around.memory_mib)
    limit = "none" if around.memory_limit_mib is None else _size(around.memory_limit_mib)
    return [
        ("CPUs", f"{around.cpus} to use of {around.host_cpus}"),
        ("memory", f"{memory}, cgroup limit {limit}"),
        ("pids", f"cgroup limit {'none' if around.pids_limit is None else around.pids_limit}"),
        ("ulimits", ", ".join(_ulimit_words(name, *both) for name, both in around.ulimits.items())),
    ]


def _ulimit_words(name: str, soft: int, hard: int) -> str:
    def words(limit: int) -> str:
        if limit < 0:
            return "unlimited"
        return f"{limit // 1024} KiB" if name in ("memlock", "core") else str(limit)

    raised = f" (may be raised to {words(hard)})" if soft != hard else ""
    return f"{name} {words(soft)}{raised}"


def _size(mib: int) -> str:
    return f"{mib:,} MiB" if mib < 10 * _MIB_PER_GIB else f"{mib // _MIB_PER_GIB:,} GiB"


def _section(title: str, rows: Rows) -> list[str]:
    if not rows:
        return []
    width = max(len(name) for name, _ in rows)
    return ["", f"## {title}", *(f"    {name:<{width}}  {value}" for name, value in rows)]
