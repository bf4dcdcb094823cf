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


V2 = "0::/a/b\n"
VERSION_2: dict[str, tuple[str, dict[str, str], int]] = {
    "the tightest of three": (
        V2,
        {
            "cpu.max": "900000 100000\n",
            "a/cpu.max": "500000 100000\n",
            "a/b/cpu.max": "700000 100000\n",
        },
        5,
    ),
    "no controller": (V2, {"a/b/cgroup.procs": ""}, HOST_CPUS),
    "more than the host has": (V2, {"a/b/cpu.max": "9900000 100000\n"}, HOST_CPUS),
    "half a CPU is still one": (V2, {"a/b/cpu.max": "50000 100000\n"}, 1),
    "another period": (V2, {"a/b/cpu.max": "60000 20000\n"}, 3),
    "a container sees its own group as the root": ("0::/\n", {"cpu.max": "600000 100000\n"}, 6),
    "the host's path is missing here": (
        "0::/system.slice/docker-1f.scope\n",
        {"cpu.max": "700000 100000\n"},
        7,
    ),
    "a path above the root": ("0::/../../pod\n", {"cpu.max": "800000 100000\n"}, 8),
    "an empty file": (V2, {"a/b/cpu.max": ""}, HOST_CPUS),
}

V1 = "5:memory:/m\n4:cpu,cpuacct:/a/b\n1:name=systemd:/a/b\n"


def quota(folder: str, us: int) -> dict[str, str]:
    """Return the files of version 1 for `us` of each 100,000 microseconds."""
    return {f"{folder}cpu.cfs_quota_us": f"{us}\n", f"{folder}cpu.cfs_period_us": "100000\n"}


VERSION_1: dict[str, tuple[str, dict[str, str], int]] = {
    "a quota of its own": (V1, quota("a/b/", 400000), 4),
    "a quota at its parent": (V1, quota("a/", 300000), 3),
    "no limit is -1": (V1, quota("a/b/", -1), HOST_CPUS),
    "one and a half": (V1, quota("a/b/", 150000), 1),
    "the host's path is missing here": ("4:cpuacct,cpu:/docker/1f\n", quota("", 500000), 5),
    "a period is missing": (V1, {"a/b/cpu.cfs_quota_us": "400000\n"}, HOST_CPUS),
    "cpuset and cpuacct are not quotas": (
        "4:cpuset:/a\n3:cpuacct:/a\n",
        quota("a/", 400000),
        HOST_CPUS,
    ),
    "both versions at once": (V1 + "0::/a/b\n", quota("a/b/", 400000), 4),
}


@pytest.mark.parametrize("case", VERSION_2)
def test_quota_of_version_2(tmp_path: Path, case: str) -> None:
    own, files, expected = VERSION_2[case]
    assert usable(tmp_path, own, files) == expected


@pytest.mark.parametrize("case", VERSION_1)
def test_quota_of_version_1(tmp_path: Path, case: str) -> None:
    own, files, expected = VERSION_1[case]
    assert usable(tmp_path, own, {f"cpu/{name}": text for name, text in files.items()}) == expected


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
