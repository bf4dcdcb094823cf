"""Checks of the node: CPUs, memory, shared memory, disk, InfiniBand, and the CUDA version."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from entrypoint.driver.gpus import Readings
from entrypoint.health.limits import Limits
from entrypoint.health.verdict import Finding, Result
from entrypoint.system.cgroup import file_text, memory_of_cgroups, usable_cpus
from entrypoint.system.infiniband import InfiniBand, read_infiniband
from entrypoint.system.torch_build import torch_architectures, torch_cuda

_MIB = 2**20
_SHM = Path("/dev/shm")  # noqa: S108 - the system's own name


@dataclass(frozen=True)
class NodeReadings:
    """Readings of the node; None for each that the system does not have.

    Attributes:
        output: the folder of the runs.
        output_fault: why the folder of the runs cannot be written.
        wheels_cuda: the CUDA version that the installed torch is built for.
        architectures: the GPU architectures that it is built for; empty if they are not known.
    """

    cpus: int
    shm_free_mib: int | None
    memory_free_mib: int | None
    disk_free_mib: int | None
    output: str | None
    output_fault: str | None
    wheels_cuda: str | None
    architectures: tuple[str, ...]
    infiniband: InfiniBand


def read_node(runs_dir: Path | None) -> NodeReadings:
    """Return the readings of the node.

    If the folder for runs does not exist yet, the folder that it would be made in is examined.
    """
    folder = nearest(runs_dir) if runs_dir else Path("/")
    return NodeReadings(
        cpus=usable_cpus(),
        shm_free_mib=_free_mib(_SHM),
        memory_free_mib=_memory_free_mib(),
        disk_free_mib=_free_mib(folder),
        output=str(runs_dir) if runs_dir else None,
        output_fault=_write_fault(folder) if runs_dir else None,
        wheels_cuda=torch_cuda(),
        architectures=torch_architectures(),
        infiniband=read_infiniband(os.environ),
    )


def nearest(folder: Path) -> Path:
    """Return the folder itself, or the nearest folder above it that exists for this user."""
    # Path.exists raises PermissionError in a folder that the user may not read.
    return next(
        (path for path in (folder, *folder.absolute().parents) if os.path.exists(path)),  # noqa: PTH110
        Path("/"),
    )


def judge_node(
    node: NodeReadings, driver: Readings, processes: int, uses_gpus: bool, limits: Limits
) -> list[Finding]:
    """Return the findings on a node on which `processes` processes will be started."""
    shm, memory = limits.shm_mib_per_process, limits.memory_mib_per_process
    findings = [
        _at_least("cpus", node.cpus, processes, "usable CPU(s)", f"{processes}, one per process"),
        _at_least(
            "shm",
            node.shm_free_mib,
            shm * processes,
            "MiB free in /dev/shm",
            f"{shm} MiB per process, for loader workers",
        ),
        _at_least(
            "memory",
            node.memory_free_mib,
            memory * processes,
            "MiB of memory free under the cgroup's limit",
            f"{memory} MiB per process",
        ),
    ]
    if node.output is not None:
        unit, limit = f"MiB free for {node.output}", f"{limits.disk_mib} MiB"
        findings.append(_at_least("disk", node.disk_free_mib, limits.disk_mib, unit, limit))
        output = Finding("output", Result.PASS, f"{node.output} can be written")
        if fault := node.output_fault:
            limit, source, action = "writable", "Trainbox", "fix_mount"
            output = Finding("output", Result.CRITICAL, fault, limit, source, action)
        findings.append(output)
    return [*findings, judge_cuda(node.wheels_cuda, driver)] if uses_gpus else findings


def _at_least(check: str, found: int | None, least: int, unit: str, limit: str) -> Finding:
    if found is None:
        return Finding(check, Result.NA, "not reported by this system")
    result, action = (Result.PASS, "") if found >= least else (Result.WARN, "make_room")
    return Finding(check, result, f"{found:,} {unit}", limit, "Trainbox", action)


def judge_cuda(wheels: str | None, driver: Readings) -> Finding:
    """Return a finding on whether the driver supports the CUDA version that torch is built for.

    The same major version or a later one is enough.
    """
    known = driver.get("cuda")
    if wheels is None:
        return Finding("cuda", Result.NA, "torch here is built without CUDA, or is not installed")
    if not isinstance(known, int):
        read = f"the driver does not report its CUDA version ({known})"
        return Finding("cuda", Result.UNKNOWN, read, action="ask_host")
    supported = f"{known // 1000}.{known % 1000 // 10}"
    version = driver.get("driver_version")
    read = f"driver {version} supports CUDA up to {supported}, torch is built for {wheels}"
    if known // 1000 >= int(wheels.split(".", 1)[0]):
        return Finding("cuda", Result.PASS, read)
    read, limit = f"this image is too new for this driver: {read}", "the same major version"
    return Finding("cuda", Result.CRITICAL, read, limit, "CUDA", "update_driver")


def judge_infiniband(found: InfiniBand) -> list[Finding]:
    """Return a finding on whether NCCL can use the node's InfiniBand or RoCE, if it has any."""
    if not found.devices:
        return []
    read = f"NCCL between nodes: {found.network}"
    if not found.fault:
        return [Finding("infiniband", Result.PASS, read)]
    limit, action = "its library loads", "install_infiniband"
    return [Finding("infiniband", Result.WARN, read, limit, "NCCL", action)]


def _free_mib(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free // _MIB
    except OSError:
        return None


def _write_fault(folder: Path) -> str | None:
    """Return why nothing can be written in `folder`, or None. This does not write anything."""
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is on a read-only file system"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written by uid {os.getuid()}, gid {os.getgid()}"
    return None


def _memory_free_mib() -> int | None:
    """Return the smaller of the host's available memory and the rest of the tightest cgroup."""
    available = [
        int(kib) // 1024
        for kib in re.findall(r"^MemAvailable: +(\d+) kB", file_text(Path("/proc/meminfo")), re.M)
    ]
    free_mib = (cgroup.free_mib for cgroup in memory_of_cgroups())
    available += [mib for mib in free_mib if mib is not None]
    return min(available, default=None)
