"""The memory limits of the cgroups of this process, and the kernel's kills at them."""

import re
from dataclasses import dataclass
from pathlib import Path

from entrypoint.system.cgroup import file_text, levels

_MIB = 2**20
_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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

    Only the kills in the cgroup of this process count. Those of a cgroup above it may have been of
    other jobs. The limit may be that of a cgroup above it.
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
