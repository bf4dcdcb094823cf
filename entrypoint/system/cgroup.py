"""The CPUs and the memory that this process may use: in a container, less than the host has.

The kernel keeps the limits in the cgroups of the process.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MIB = 2**20
_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def levels(
    controller: str, root: Path = _ROOT, own_cgroup: Path = _OWN
) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each cgroup of this process, from its own up to the root.

    Each item is (folder, whether the cgroup is of version 2). A folder may be missing: inside a
    container the path may be the host's. The root then has the container's own limits.
    """
    for line in file_text(own_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        folder = base / path.lstrip("/")
        for level in [folder, *folder.parents]:
            yield level, not controllers
            if level == base:
                break


def file_text(path: Path) -> str:
    """Return the contents of the file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def usable_cpus(cgroup_root: Path = _ROOT, own_cgroup: Path = _OWN) -> int:
    """Return the number of CPUs that this process may use, at least 1.

    This is the smaller of the CPU affinity and the tightest quota (cgroup v1 or v2).
    """
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min([affinity, *_quotas(cgroup_root, own_cgroup)]))


def _quotas(root: Path, own_cgroup: Path) -> list[int]:
    """Return the whole CPUs that each cgroup allows, from this process's own up to the root."""
    quotas = []
    for level, version_2 in levels("cpu", root, own_cgroup):
        if version_2:
            numbers = file_text(level / "cpu.max").split()
        else:
            numbers = [
                file_text(level / "cpu.cfs_quota_us").strip(),
                file_text(level / "cpu.cfs_period_us").strip(),
            ]
        if len(numbers) == 2 and numbers[0].isdigit() and numbers[1].isdigit():
            quotas.append(int(numbers[0]) // int(numbers[1]))
    return quotas


@dataclass(frozen=True)
class CgroupMemory:
    """The memory of one cgroup.

    Attributes:
        limit_mib: the limit; None if it has none.
        free_mib: what is left of the limit, with the file cache that the kernel can free.
        kills: the number of processes that the kernel has killed because memory was used up; None
            if it does not count them here.
    """

    limit_mib: int | None
    free_mib: int | None
    kills: int | None


def memory_of_cgroups(root: Path = _ROOT, own_cgroup: Path = _OWN) -> list[CgroupMemory]:
    """Return the memory of each cgroup of this process, from its own up to the root."""
    return [
        _read(level, "max", "current", "events")
        if version_2
        else _read(level, "limit_in_bytes", "usage_in_bytes", "oom_control")
        for level, version_2 in levels("memory", root, own_cgroup)
    ]


def used_up_since(before: list[CgroupMemory], now: list[CgroupMemory]) -> str | None:
    """Return which memory is used up if the kernel has killed a process since `before`, or None.

    Only kills in the cgroup of this process count: a kill in a cgroup above it may belong to
    another job. The limit may be the limit of a cgroup above it.
    """
    first, last = (
        next((each.kills for each in cgroups if each.kills is not None), 0)
        for cgroups in (before, now)
    )
    if last <= first:
        return None
    limit_mib = min((each.limit_mib for each in now if each.limit_mib is not None), default=None)
    if limit_mib is None:
        return "the host's memory is used up"
    return f"the memory limit of {limit_mib:,} MiB is used up"


def _read(level: Path, most: str, used: str, events: str) -> CgroupMemory:
    limit, usage = (_number(file_text(level / f"memory.{name}")) for name in (most, used))
    kills = _number(file_text(level / f"memory.{events}"), r"^oom_kill (\d+)")
    if limit is None or limit >= 2**62:  # version 1 has the largest number for no limit
        return CgroupMemory(None, None, kills)
    cache = _number(file_text(level / "memory.stat"), r"^(?:total_)?inactive_file (\d+)") or 0
    free_mib = None if usage is None else max(0, limit - usage + cache) // _MIB
    return CgroupMemory(limit // _MIB, free_mib, kills)


def _number(text: str, pattern: str = r"^(\d+)$") -> int | None:
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else None
