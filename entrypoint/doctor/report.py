"""The report of `trainbox doctor` as text. Pure.

The headings and indented rows keep their form when they are pasted into an issue.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from entrypoint.doctor.redaction import Hidden, redacted, shown_environment
from entrypoint.doctor.surroundings import Folder, Surroundings
from entrypoint.driver.gpus import Gpu
from entrypoint.health.screen import closing_line
from entrypoint.health.verdict import Finding, Result, Verdict, by_weight

_REPORTED = (Result.CRITICAL, Result.UNKNOWN, Result.WARN)
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
_DOCKER_CAPABILITIES = "00000000a80425fb"
_MIB_PER_GIB = 1024
_LONGEST_PROBLEM = 800  # characters; the remedy at the end must not be cut off
_NEEDED = re.compile(r"nvidia(?:ctl|-uvm|\d+)")  # devices for computing; others are for screens

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class DriverAnswer:
    """The answers of the NVIDIA driver.

    Attributes:
        summary: the version, or why it is not known.
        installed: whether the driver is installed, even if it does not work.
        gpus: all GPUs that the driver lists.
        visible: the GPUs that CUDA_VISIBLE_DEVICES selects.
    """

    summary: str
    installed: bool
    gpus: tuple[Gpu, ...] = ()
    visible: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class TorchAnswer:
    """The answers of torch, as trainer/machine/torch_info.py prints them.

    Attributes:
        fault: why torch did not answer, or empty.
        error: why torch or CUDA does not start, or empty.
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
    """The values of a report."""

    taken_at: str
    verdict: Verdict
    driver: DriverAnswer
    torch: TorchAnswer
    around: Surroundings
    env: Mapping[str, str]
    hidden: Hidden


def report(seen: Examination) -> str:
    """Return the whole report. Private text is removed from each value of another program."""
    sections = {
        "versions": list(seen.around.software.items()),
        "GPUs": _gpus(seen),
        "runtime": _runtime(seen.around),
        "mounts and disk": [(folder.name, _folder(folder)) for folder in seen.around.folders],
        "limits": _limits(seen.around),
    }
    lines = [
        f"trainbox doctor, {seen.taken_at}. Names, home folders and values that look like secrets "
        "are removed. Read the report before you paste it.",
        "",
        "## verdict",
        closing_line(seen.verdict),
        *(f"- {line}" for line in finding_lines(seen.verdict.findings, seen.hidden)),
        *(f"- {redacted(line, seen.hidden, _LONGEST_PROBLEM)}" for line in problems(seen)),
    ]
    for title, rows in sections.items():
        lines += _section(title, [(name, redacted(value, seen.hidden)) for name, value in rows])
    return "\n".join([*lines, *_section("environment", shown_environment(seen.env, seen.hidden))])


def finding_lines(findings: Iterable[Finding], hidden: Hidden) -> list[str]:
    """Return a line for each finding that did not pass. GPUs with the same finding share a line."""
    alike: dict[Finding, list[str]] = {}
    for finding in by_weight([finding for finding in findings if finding.result in _REPORTED]):
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


def problems(seen: Examination) -> list[str]:
    """Return the problems that no check of the verdict covers, each with its remedy."""
    around = seen.around
    found = [difference(seen), *seen.torch.warnings]
    if not seen.driver.installed and (around.kernel_module or around.pci_gpus):
        found.append(_gpus_not_given(around))
    if around.own_name_fault:
        found.append(
            f"this machine's host name cannot be resolved ({around.own_name_fault}), and torchrun "
            "needs it: add it to /etc/hosts (docker run: drop --network none, or add --add-host)"
        )
    return [line for line in found if line]


def difference(seen: Examination) -> str:
    """Return the likely reason why torch does not see the visible GPUs, or "" if it does."""
    answer, driver, visible = seen.torch, seen.driver, len(seen.driver.visible)
    if answer.fault:
        return f"torch {answer.fault}"
    if not answer.version:
        return f"torch cannot be used: {answer.error}"
    if answer.count == visible:
        return ""
    left = "" if visible == len(driver.gpus) else f", CUDA_VISIBLE_DEVICES leaves {visible}"
    counts = (
        f"driver sees {len(driver.gpus)} GPU{'s' if len(driver.gpus) != 1 else ''}{left}, torch "
        f"sees {answer.count}"
    )
    return f"{counts}: {_reason(seen)}"


def _reason(seen: Examination) -> str:
    answer, visible, devices = seen.torch, seen.driver.visible, seen.around.devices
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
        "Trainbox plans with the driver's list; start the container with "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility": (answer.count > len(visible)),
        f"torch {answer.version} is built without CUDA; install the version in requirements.lock": (
            answer.cuda is None
        ),
        "CUDA shows a process only one MIG slice, so this is correct": (
            answer.count == 1 and any(gpu.mig_index is not None for gpu in visible)
        ),
        f"this driver is too old for torch's CUDA {answer.cuda}; see above": too_old,
        f"the driver's CUDA library is missing ({answer.libcuda}); start the container with --gpus "
        "all and NVIDIA_DRIVER_CAPABILITIES=compute,utility, or install libcuda1 on the "
        "host": answer.libcuda,
        f"this user may not read and write {' '.join(closed)}; grant the access, or pass the "
        "devices to the container": closed,
        "/dev/nvidia-uvm is missing; pass this device to the container, or load the kernel module "
        "nvidia_uvm on the host": (
            devices and "nvidia-uvm" not in devices and "dxg" not in devices
        ),
        "CUDA may interpret CUDA_VISIBLE_DEVICES differently; unset it and try again": (
            "CUDA_VISIBLE_DEVICES" in seen.env
        ),
        f"{answer.error or 'no reason given'}; recreate the container, and run `nvidia-smi` in it "
        "and on the host": True,
    }
    return next(text for text, applies in reasons.items() if applies)


def _gpus_not_given(around: Surroundings) -> str:
    if not around.kernel_module:
        return (
            f"{around.pci_gpus} NVIDIA GPU(s) on the PCI bus, but no driver is loaded: install "
            "the driver on the host"
        )
    inside = (
        "this container has no access to it: start it with --gpus all (it needs "
        "nvidia-container-toolkit on the host)"
    )
    missing = (
        "its libraries are missing: install the driver's user-space packages, such as "
        "libnvidia-compute"
    )
    return (
        f"the host runs NVIDIA driver {around.kernel_module}, but "
        f"{inside if around.signs else missing}"
    )


def _gpus(seen: Examination) -> Rows:
    answer, driver = seen.torch, seen.driver
    versions = [f"CUDA {answer.cuda}" if answer.cuda else "without CUDA"]
    versions += [f"cuDNN {answer.cudnn}"] if answer.cudnn else []
    versions += [f"NCCL {answer.nccl}"] if answer.nccl else []
    rows = [
        ("driver", driver.summary),
        ("kernel module", seen.around.kernel_module or "not loaded here"),
    ]
    rows += [
        ("CUDA", finding.read)
        for finding in seen.verdict.findings
        if finding.check == "cuda" and finding.result is Result.PASS
    ]
    rows += [
        (_span([gpu.label for gpu in group]), text)
        for text, group in groupby(driver.gpus, _gpu_text)
    ]
    rows += [("memory in use", used)] if (used := _memory_in_use(seen.verdict)) else []
    rows += [
        (
            "torch",
            ", ".join([answer.version, *versions, *["Apple GPU"] * answer.mps])
            if answer.version
            else "no answer",
        )
    ]
    if answer.file and not answer.file.startswith(seen.around.python_prefix):
        rows.append(("torch's path", f"{answer.file}, which is outside this Python's folder"))
    rows.append(
        (
            "seen",
            f"by the driver {len(driver.gpus)}, visible {len(driver.visible)}, by torch "
            f"{answer.count}",
        )
    )
    rows += (
        [(f"torch's {index}", name) for index, name in enumerate(answer.names)]
        if _other_names(seen)
        else []
    )
    if answer.error and (driver.installed or not answer.version):
        rows.append(("torch's error", answer.error))
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
    return ", ".join(
        f"{_span([label for label, _ in group])}: {memory}" for memory, group in groups
    )


def _other_names(seen: Examination) -> bool:
    return sorted(seen.torch.names) != sorted(gpu.name for gpu in seen.driver.visible)


def _gpu_text(gpu: Gpu) -> str:
    return f"{gpu.name}, {gpu.memory_mib:,} MiB{f': {gpu.fault}' if gpu.fault else ''}"


def _span(labels: Sequence[str]) -> str:
    return f"GPU {labels[0]}" if len(labels) == 1 else f"GPU {labels[0]} to {labels[-1]}"


def _runtime(around: Surroundings) -> Rows:
    groups = f", groups {' '.join(map(str, around.groups))}" if around.groups else ""
    named = "" if around.has_passwd_entry else ", no passwd entry"
    effective, seccomp = (
        around.process_status.get("CapEff", "unknown"),
        around.process_status.get("Seccomp", "unknown"),
    )
    capabilities = {"0" * 16: "none", _DOCKER_CAPABILITIES: "Docker's default"}.get(
        effective, effective
    )
    nodes: dict[str, list[str]] = {}
    for name, access in around.devices.items():
        nodes.setdefault(access or "no access", []).append(name)
    name = "resolved to a loopback address" if around.own_name_loopback else "resolved"
    return [
        (
            "inside",
            ", ".join(around.signs) or "no container and no scheduler detected",
        ),
        ("user", f"uid {around.uid}, gid {around.gid}{groups}{named}"),
        ("capabilities", capabilities),
        (
            "no new privileges",
            {"0": "off", "1": "on"}.get(around.process_status.get("NoNewPrivs", ""), "unknown"),
        ),
        ("seccomp", {"0": "off", "1": "strict", "2": "filter"}.get(seccomp, seccomp)),
        (
            "/dev",
            "; ".join(f"{access}: {' '.join(names)}" for access, names in nodes.items())
            or "no nvidia*",
        ),
        ("PCI bus", f"{around.pci_gpus} NVIDIA GPU(s)"),
        ("between nodes", f"NCCL over {around.nccl_network}"),
        ("own host name", around.own_name_fault or name),
    ]


def _folder(folder: Folder) -> str:
    path = (
        folder.path
        if folder.path == folder.found
        else f"{folder.path} is missing; would be in {folder.found}"
    )
    remote = ", over the network" if folder.file_system in _NETWORK else ""
    remote = ", through a program" if folder.file_system.startswith("fuse") else remote
    access = (
        "read-only"
        if folder.read_only
        else "writable"
        if folder.writable
        else "not writable by this user"
    )
    return (
        f"{path}: {folder.file_system}{remote}, {access}, {_size(folder.free_mib)} free of "
        f"{_size(folder.total_mib)}"
    )


def _limits(around: Surroundings) -> Rows:
    memory = "unknown" if around.memory_mib is None else _size(around.memory_mib)
    limit = "none" if around.memory_limit_mib is None else _size(around.memory_limit_mib)
    return [
        ("CPUs", f"{around.cpus} usable of {around.host_cpus}"),
        ("memory", f"{memory}, cgroup limit {limit}"),
        ("pids", f"cgroup limit {'none' if around.pids_limit is None else around.pids_limit}"),
        ("ulimits", ", ".join(_ulimit(name, *both) for name, both in around.ulimits.items())),
    ]


def _ulimit(name: str, soft: int, hard: int) -> str:
    def text(limit: int) -> str:
        if limit < 0:
            return "unlimited"
        return f"{limit // 1024} KiB" if name in ("memlock", "core") else str(limit)

    raised = f" (can be raised to {text(hard)})" if soft != hard else ""
    return f"{name} {text(soft)}{raised}"


def _size(mib: int) -> str:
    return f"{mib:,} MiB" if mib < 10 * _MIB_PER_GIB else f"{mib // _MIB_PER_GIB:,} GiB"


def _section(title: str, rows: Rows) -> list[str]:
    if not rows:
        return []
    width = max(len(name) for name, _ in rows)
    return ["", f"## {title}", *(f"    {name:<{width}}  {value}" for name, value in rows)]
