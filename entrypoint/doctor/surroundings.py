"""Read the surroundings of a training on this machine as rows of a report.

Nothing is written, and the network is not used.
"""

import importlib.metadata
import os
import platform
import pwd
import re
import resource
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from entrypoint.doctor.redaction import Hidden, other_hosts, private_names
from entrypoint.health.node import nearest
from entrypoint.system.cgroup import file_text, levels, memory_of_cgroups, usable_cpus
from entrypoint.system.container import signs_here
from entrypoint.system.infiniband import read_infiniband
from entrypoint.system.nvidia import kernel_module, pci_gpus
from entrypoint.system.revision import revision
from trainbox.contract.build_info import build_info

_ROOT = Path(__file__).parents[2]
_GIB = 2**30
_PACKAGES = ("torch", "torchvision", "numpy", "nvidia-ml-py")
_USER_NAMES = ("USER", "LOGNAME", "LNAME", "USERNAME", "SUDO_USER", "SLURM_JOB_USER")


@dataclass(frozen=True)
class Surroundings:
    """This machine as rows of a report, and the values that explain problems.

    Attributes:
        sections: the rows of each section, by the title of the section.
        signs: the containers and schedulers around this process.
        devices: NVIDIA's nodes in /dev, with this user's access, such as rw.
        kernel_module: the version of NVIDIA's module, empty if it is not loaded.
        pci_gpus: the number of NVIDIA GPUs on the PCI bus.
    """

    sections: Mapping[str, Mapping[str, str]]
    signs: tuple[str, ...]
    devices: Mapping[str, str]
    kernel_module: str
    pci_gpus: int


def read_surroundings(
    runs_dir: Path, data_dir: Path, env: Mapping[str, str]
) -> tuple[Surroundings, Hidden]:
    """Return the surroundings, and the names to hide."""
    signs, devices, on_bus, module = signs_here(env), _devices(), len(pci_gpus()), kernel_module()
    account, groups = _account(), " ".join(map(str, os.getgroups()))
    homes = [home for home in (env.get("HOME"), account and account.pw_dir) if home]
    homes += [os.path.realpath(home) for home in homes]
    users = [env.get(name, "") for name in _USER_NAMES] + [account.pw_name if account else ""]
    users += [Path(home).name for home in homes if home.startswith(("/home/", "/Users/"))]
    hidden = private_names(homes, users, [socket.gethostname(), *other_hosts(env)])
    runtime = {
        "inside": ", ".join(signs) or "no container and no scheduler detected",
        "user": f"uid {os.getuid()}, gid {os.getgid()}, groups {groups or 'none'}"
        f"{'' if account else ', no passwd entry'}",
        # The capabilities and the restrictions of this process, as the kernel writes them.
        "permissions": ", ".join(
            f"{name} {value}"
            for name, value in re.findall(
                r"^(CapEff|NoNewPrivs|Seccomp):\s+(\S+)",
                file_text(Path("/proc/self/status")),
                re.M,
            )
        ),
        "/dev": ", ".join(f"{name} {access or 'no access'}" for name, access in devices.items())
        or "no nvidia*",
        "PCI bus": f"{on_bus} NVIDIA GPU(s)",
        "kernel module": module or "not loaded here",
        "between nodes": f"NCCL over {read_infiniband(env).network}",
    }
    folders = {"root": Path("/"), "home": Path(env.get("HOME") or "/"), "runs": runs_dir}
    # Doctor only looks at these folders and does not write to them.
    folders |= {"data": data_dir, "temporary": Path("/tmp"), "shared memory": Path("/dev/shm")}  # noqa: S108
    mounts = file_text(Path("/proc/self/mounts"))
    sections = {
        "versions": _versions(env),
        "runtime": runtime,
        "mounts and disk": {name: _folder(path, mounts) for name, path in folders.items()},
        "limits": _limits(),
    }
    return Surroundings(sections, signs, devices, module, on_bus), hidden


def file_system_of(path: str, mounts: str) -> str:
    """Return the type of the file system of `path` from the text of /proc/self/mounts. Pure.

    The later of two mounts at the same point covers the earlier one.
    """
    best, kind = "", "unknown"
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])
        if len(point) >= len(best) and Path(path).is_relative_to(point):
            best, kind = point, fields[2]
    return kind


def _versions(env: Mapping[str, str]) -> dict[str, str]:
    """Return the names and versions of the software, and the name of the CPU."""
    # Outside of a checkout, git would describe the repository around the installed package.
    checkout = revision(_ROOT) if (_ROOT / ".git").exists() else None
    system = _first('^PRETTY_NAME="(.*)"', "/etc/os-release") or platform.system()
    libc = " ".join(platform.libc_ver())
    return {
        "trainbox": f"{_version('trainbox')}, "
        f"revision {build_info(env).get('revision') or checkout or 'unknown'}",
        "python": f"{platform.python_version()}, {sys.prefix}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "system": f"{system}, kernel {platform.release()} {platform.machine()}, {libc}",
        "CPU": _first(r"^model name\s*: (.*)$", "/proc/cpuinfo") or platform.processor(),
    }


def _version(package: str) -> str:
    installed = importlib.metadata.distributions(name=package)
    return next((distribution.version for distribution in installed), "not installed")


def _devices() -> dict[str, str]:
    """Return NVIDIA's device nodes with this user's access.

    The access comes from the mode of each file. Opening a node would wake a driver that may hang.
    """
    found = (node for name in ("nvidia*", "dxg") for node in sorted(Path("/dev").glob(name)))
    modes = {"r": os.R_OK, "w": os.W_OK}
    return {
        node.name: "".join(letter for letter, mode in modes.items() if os.access(node, mode))
        for node in found
        if not node.is_dir()
    }


def _folder(path: Path, mounts: str) -> str:
    absolute = Path(os.path.realpath(path))
    found = nearest(absolute)
    try:
        disk = os.statvfs(found)
    except OSError as error:
        return f"{found}: {error.strerror}"
    where = found if found == absolute else f"{absolute} is missing; would be in {found}"
    if disk.f_flag & os.ST_RDONLY:
        access = "read-only"
    else:
        access = f"{'' if os.access(found, os.W_OK | os.X_OK) else 'not '}writable by this user"
    free, total = (blocks * disk.f_frsize / _GIB for blocks in (disk.f_bavail, disk.f_blocks))
    kind = file_system_of(str(found), mounts)
    return f"{where}: {kind}, {access}, {free:,.1f} GiB free of {total:,.1f}"


def _limits() -> dict[str, str]:
    limits_mib = [each.limit_mib for each in memory_of_cgroups() if each.limit_mib is not None]
    pids = [file_text(level / "pids.max").strip() for level, _ in levels("pids")]
    lowest = min((int(limit) for limit in pids if limit.isdigit()), default="none")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB
    pairs = {
        name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        for name in ("nofile", "nproc", "memlock", "core")
    }
    ulimits = ", ".join(f"{name} {soft} (hard {hard})" for name, (soft, hard) in pairs.items())
    return {
        "CPUs": f"{usable_cpus()} usable of {os.cpu_count()}",
        "memory": f"{total:,.1f} GiB, cgroup limit in MiB: {min(limits_mib, default='none')}",
        "pids": f"cgroup limit {lowest}",
        "ulimits": re.sub(r"-1\b", "unlimited", ulimits),
    }


def _account() -> pwd.struct_passwd | None:
    """Return this user's entry in the password database, or None."""
    try:
        return pwd.getpwuid(os.getuid())
    except KeyError:
        return None


def _first(pattern: str, path: str) -> str:
    """Return the first group of the first match in a file, or an empty string."""
    match = re.search(pattern, file_text(Path(path)), re.M)
    return match[1] if match else ""
