"""The cgroups of this process, in which the kernel keeps its limits."""

from collections.abc import Iterator
from pathlib import Path


def levels(
    controller: str,
    root: Path = Path("/sys/fs/cgroup"),
    own_cgroup: Path = Path("/proc/self/cgroup"),
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
