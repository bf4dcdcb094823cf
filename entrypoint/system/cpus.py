"""How many CPUs this process may really use: the cgroup's quota, not the host's count."""

import os
from pathlib import Path

from entrypoint.system.cgroup import file_text, levels


def usable_cpus(
    cgroup_root: Path = Path("/sys/fs/cgroup"), own_cgroup: Path = Path("/proc/self/cgroup")
) -> int:
    """The smaller of the CPU affinity and the tightest cgroup quota (v1 or v2) above this process,
    at least 1.
    """
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min([affinity, *_quotas(cgroup_root, own_cgroup)]))


def _quotas(root: Path, own_cgroup: Path) -> list[int]:
    """Whole CPUs allowed by each cgroup from this process's own up to the root."""
    quotas = []
    for level, version_2 in levels("cpu", root, own_cgroup):
        if version_2:
            words = file_text(level / "cpu.max").split()
        else:
            words = [
                file_text(level / "cpu.cfs_quota_us").strip(),
                file_text(level / "cpu.cfs_period_us").strip(),
            ]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            quotas.append(int(words[0]) // int(words[1]))
    return quotas
