"""The memory limits of cgroups, and the kernel's kills at them."""

from pathlib import Path

import pytest

from entrypoint.system.cgroup import CgroupMemory, memory_of_cgroups, used_up_since

_MIB = 2**20
_NONE = CgroupMemory(None, None, None)
# The file /proc/self/cgroup, the files in /sys/fs/cgroup, and what is read.
# fmt: off
_CASES: dict[str, tuple[str, dict[str, str], list[CgroupMemory]]] = {
    "version 2": (
        "0::/a\n",
        {
            "a/memory.max": f"{300 * _MIB}\n",
            "a/memory.current": f"{200 * _MIB}\n",
            "a/memory.stat": f"anon 5\ninactive_file {50 * _MIB}\n",
            "a/memory.events": "low 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n",
        },
        [CgroupMemory(300, 150, 2), _NONE],
    ),
    "version 2 without a limit": ("0::/a\n",
     {"a/memory.max": "max\n", "a/memory.current": "5\n", "a/memory.events": "oom_kill 1\n"},
     [CgroupMemory(None, None, 1), _NONE]),
    "version 1": (
        "5:cpu:/\n4:memory:/a\n",
        {
            "memory/a/memory.limit_in_bytes": f"{300 * _MIB}\n",
            "memory/a/memory.usage_in_bytes": f"{400 * _MIB}\n",
            "memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "5\n",
        },
        [CgroupMemory(300, 0, 4), _NONE],
    ),
    "a kernel without the counter": ("4:memory:/\n",
     {"memory/memory.limit_in_bytes": f"{_MIB}\n", "memory/memory.oom_control": "under_oom 0\n"},
     [CgroupMemory(1, None, None)]),
    "no cgroups": ("", {}, []),
}
# fmt: on


@pytest.mark.parametrize("case", _CASES)
def test_the_memory_of_cgroups(case: str, tmp_path: Path) -> None:
    own, files, expected = _CASES[case]
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_of_cgroups(tmp_path / "root", tmp_path / "own") == expected


# fmt: off
_KILLS = [
    ([CgroupMemory(300, 5, 1)], [CgroupMemory(300, 5, 1)], None),
    ([CgroupMemory(3000, 5, 1), CgroupMemory(None, None, 1)],
     [CgroupMemory(3000, 5, 2), CgroupMemory(None, None, 2)],
     "the memory limit of 3,000 MiB is used up"),
    ([CgroupMemory(None, None, 0)], [CgroupMemory(None, None, 1)], "the host's memory is used up"),
    # Another job of the same cgroup above was killed.
    ([CgroupMemory(300, 5, 1), CgroupMemory(None, None, 1)],
     [CgroupMemory(300, 5, 1), CgroupMemory(None, None, 2)], None),
    # The path of the host is not visible in a container, whose own cgroup is the root.
    ([_NONE, CgroupMemory(300, 5, 1)], [_NONE, CgroupMemory(300, 5, 2)],
     "the memory limit of 300 MiB is used up"),
]
# fmt: on


@pytest.mark.parametrize(("before", "now", "expected"), _KILLS)
def test_only_a_new_kill_means_that_memory_is_used_up(
    before: list[CgroupMemory], now: list[CgroupMemory], expected: str | None
) -> None:
    assert used_up_since(before, now) == expected
