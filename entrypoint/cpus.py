"""How many CPUs this process may really use: the cgroup's quota, not the host's count."""

import os
from pathlib import Path


def usable_cpus(cgroup_root: Path = Path("/sys/fs/cgroup"), own_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """The smaller of the CPU affinity and the tightest cgroup quota (v1 or v2) above this process, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *_quotas(cgroup_root, own_cgroup)]))


def _quotas(root: Path, own_cgroup: Path) -> list[int]:
    """Whole CPUs allowed by each cgroup from this process's own up to the root."""
    quotas = []
    for line in _read(own_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root if not controllers else root / "cpu"
        folder = base / path.lstrip("/")
        # Inside a container the path may be the host's and missing here; the root then holds the container's own quota.
        for level in [folder, *folder.parents]:
            if controllers:
                words = [_read(level / "cpu.cfs_quota_us").strip(), _read(level / "cpu.cfs_period_us").strip()]
            else:
                words = _read(level / "cpu.max").split()
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
                quotas.append(int(words[0]) // int(words[1]))
            if level == base:
                break
    return quotas


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
