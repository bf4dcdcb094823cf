"""The number of usable CPUs, from cgroup trees of both versions and from the affinity."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from entrypoint.system.cgroup import usable_cpus

HOST_CPUS = 64


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(HOST_CPUS)), raising=False)


def usable(folder: Path, own: str, files: Mapping[str, str]) -> int:
    """Return the CPUs of a process with the cgroup `own` and `files` in /sys/fs/cgroup."""
    (folder / "own").write_text(own)
    for name, text in files.items():
        path = folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return usable_cpus(folder / "root", folder / "own")


V1, V2 = "5:memory:/m\n4:cpu,cpuacct:/a/b\n1:name=systemd:/a/b\n", "0::/a/b\n"


def quota(folder: str, us: int) -> dict[str, str]:
    """Return the files of version 1 for `us` of each 100,000 microseconds."""
    folder = f"cpu/{folder}cpu.cfs"
    return {f"{folder}_quota_us": f"{us}\n", f"{folder}_period_us": "100000\n"}


# The file /proc/self/cgroup, the files in /sys/fs/cgroup, and the number of CPUs.
# fmt: off
CASES: dict[str, tuple[str, dict[str, str], int]] = {
    "version 2: the tightest of three": (
        V2,
        {
            "cpu.max": "900000 100000\n",
            "a/cpu.max": "500000 100000\n",
            "a/b/cpu.max": "700000 100000\n",
        },
        5,
    ),
    "version 2: half a CPU is still one": (V2, {"a/b/cpu.max": "50000 100000\n"}, 1),
    "version 2: another period": (V2, {"a/b/cpu.max": "70000 20000\n"}, 3),
    "version 2: the host's path is missing here": (
        "0::/system.slice/docker-1f.scope\n", {"cpu.max": "700000 100000\n"}, 7),
    "version 2: a path above the root": (
        "0::/../../pod\n", {"cpu.max": "800000 100000\n"}, 8),
    "version 2: an empty file": (V2, {"a/b/cpu.max": ""}, HOST_CPUS),
    "version 1: no limit is -1": (V1, quota("a/b/", -1), HOST_CPUS),
    "version 1: the host's path is missing here": (
        "4:cpuacct,cpu:/docker/1f\n", quota("", 500000), 5),
    "version 1: a period is missing": (
        V1, {"cpu/a/b/cpu.cfs_quota_us": "400000\n"}, HOST_CPUS),
    "version 1: cpuset and cpuacct are not quotas": (
        "4:cpuset:/a\n3:cpuacct:/a\n", quota("a/", 400000), HOST_CPUS),
    "both versions at once": (V1 + V2, quota("a/b/", 400000), 4),
}
# fmt: on


@pytest.mark.parametrize("case", CASES)
def test_the_quota_of_a_cgroup(tmp_path: Path, case: str) -> None:
    own, files, expected = CASES[case]
    assert usable(tmp_path, own, files) == expected


def test_a_smaller_affinity_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 5, 9}, raising=False)
    assert usable(tmp_path, V2, {"a/b/cpu.max": "400000 100000\n"}) == 3
    assert usable(tmp_path, V2, {"a/b/cpu.max": "200000 100000\n"}) == 2


def test_without_cgroups_and_affinity_all_cpus_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert usable_cpus(tmp_path / "none", tmp_path / "none") == 12
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cpus(tmp_path / "none", tmp_path / "none") == 1
