"""The number of CPUs that this process may use, which in a container is below the host's."""

import os
from pathlib import Path

from entrypoint.system.cgroup import file_text, levels


def usable_cpus(
    cgroup_root: Path = Path("/sys/fs/cgroup"), own_cgroup: Path = Path("/proc/self/cgroup")
) -> int:
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
