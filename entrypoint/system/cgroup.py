"""Where the kernel keeps the limits of this process: its cgroup and those above, of both
versions.
"""

from collections.abc import Iterator
from pathlib import Path


def levels(
    controller: str,
    root: Path = Path("/sys/fs/cgroup"),
    own_cgroup: Path = Path("/proc/self/cgroup"),
) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is of version 2), from this process's own cgroup up to the root; a folder
    may be missing.

    Inside a container the path may be the host's and missing here; the root then holds the
    container's own limits.
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
    """What the file holds; nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
