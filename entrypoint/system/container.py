"""The containers and schedulers around this process."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from entrypoint.system.cgroup import file_text
from trainbox.processes.streams import message

_MARKS = ("/.dockerenv", "/run/.containerenv")  # files that container engines create
SLURM = "a SLURM job"


def signs_here(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the containers and schedulers whose signs were found here."""
    marks = tuple(mark for mark in _MARKS if os.path.exists(mark))  # noqa: PTH110 - it never raises
    return container_signs(env, file_text(Path("/proc/self/cgroup")), platform.release(), marks)


def in_image() -> bool:
    """Return whether this process runs in a container of our image."""
    return "TRAINBOX_BUILD_INFO" in os.environ


def lost_with_container(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return whether `folder` is in the file system of a container of our image, not in a mount."""
    if not in_image():
        return False
    existing = next(filter(os.path.exists, [folder.absolute(), *folder.absolute().parents]))
    # Of a line `36 35 98:0 / /workspace/runs rw - ext4 /dev/sda1 rw`, the mount point and the type.
    found = {
        fields[4]: fields[fields.index("-") + 1]
        for line in file_text(mounts).splitlines()
        if "-" in (fields := line.split())
    }
    above = {str(path) for path in (existing.resolve(), *existing.resolve().parents)}
    nearest = max(above & found.keys(), key=len, default="")
    return found.get(nearest) in ("overlay", "tmpfs")


def warn_of_loss(folder: Path) -> None:
    """Print that `folder` is lost with this container, if it is."""
    if lost_with_container(folder):
        path = folder.absolute()
        message(
            f"{path} is lost when this container is removed: keep the runs on the host, as in "
            f'`docker run -v "$PWD/runs:{path}" ...`'
        )


def in_container() -> bool:
    """Return whether this process runs in a container."""
    return bool({*signs_here(os.environ)} - {SLURM})


def container_signs(
    env: Mapping[str, str], cgroup: str, kernel: str, marks: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the containers and schedulers whose signs were found. Pure.

    `marks` are the existing marker files, such as /.dockerenv.
    """
    signs = {
        "Docker": "/.dockerenv" in marks or "docker" in cgroup,
        "Podman": "/run/.containerenv" in marks or "libpod" in cgroup,
        "Apptainer": "APPTAINER_NAME" in env or "SINGULARITY_NAME" in env,
        "Kubernetes": "KUBERNETES_SERVICE_HOST" in env or "kubepods" in cgroup,
        "containerd": "containerd" in cgroup,
        "LXC": "lxc" in cgroup,
        SLURM: "SLURM_JOB_ID" in env,
        "WSL": "microsoft" in kernel.lower(),
    }
    return tuple(sign for sign, found in signs.items() if found)
