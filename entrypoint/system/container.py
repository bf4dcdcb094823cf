"""The containers and schedulers around this process."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from entrypoint.system.cgroup import file_text

_MARKS = ("/.dockerenv", "/run/.containerenv")  # files that container engines create
SLURM = "a SLURM job"


def signs_here(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the containers and schedulers whose signs were found here."""
    marks = tuple(mark for mark in _MARKS if os.path.exists(mark))  # noqa: PTH110 - it never raises
    return container_signs(env, file_text(Path("/proc/self/cgroup")), platform.release(), marks)


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
