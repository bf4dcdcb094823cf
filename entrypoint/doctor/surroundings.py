"""Read the surroundings of a training on this machine as values.

Nothing is written. The network is used only to resolve this machine's host name.
"""

import importlib.metadata
import json
import os
import platform
import pwd
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from entrypoint.doctor.redaction import other_hosts
from entrypoint.health.node import nearest
from entrypoint.system.cgroup import file_text, levels
from entrypoint.system.cpus import usable_cpus
from entrypoint.system.infiniband import read_infiniband

_MIB = 2**20
_ROOT = Path(__file__).parents[2]
_UNLIMITED = 2**60  # bytes: cgroups of version 1 write a number near 2**63 for "no limit"
_GIT_S, _RESOLVE_S = 5.0, 5.0
_ULIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
    "core": resource.RLIMIT_CORE,
}


@dataclass(frozen=True)
class Folder:
    """A folder that trainings use.

    `found` is the folder itself, or the existing folder in which it would be created.
    """

    name: str
    path: str
    found: str
    file_system: str
    read_only: bool
    writable: bool
    free_mib: int
    total_mib: int


@dataclass(frozen=True)
class Surroundings:
    """The software, the permissions, the folders and the limits of this machine.

    A value is None if the system does not report it or sets no limit.
    """

    software: Mapping[str, str]
    python_prefix: str
    signs: tuple[str, ...]  # of containers and schedulers
    uid: int
    gid: int
    groups: tuple[int, ...]
    has_passwd_entry: bool
    process_status: Mapping[str, str]  # lines of /proc/self/status
    devices: Mapping[str, str]  # NVIDIA's nodes in /dev, with this user's access, such as rw
    kernel_module: str  # version of NVIDIA's module, empty if it is not loaded
    pci_gpus: int  # the number of NVIDIA GPUs on the PCI bus
    nccl_network: str  # that NCCL uses between nodes
    folders: tuple[Folder, ...]
    cpus: int
    host_cpus: int | None
    memory_mib: int | None
    memory_limit_mib: int | None
    pids_limit: int | None
    ulimits: Mapping[str, tuple[int, int]]  # soft and hard, -1 for none; memlock and core in bytes
    own_name_fault: str  # why this machine's host name cannot be resolved, or empty
    own_name_loopback: bool


@dataclass(frozen=True)
class Identity:
    """The names that identify a user or a machine, which a report hides."""

    homes: tuple[str, ...]
    users: tuple[str, ...]
    hosts: tuple[str, ...]


def read_surroundings(
    runs_dir: Path, data_dir: Path, env: Mapping[str, str]
) -> tuple[Surroundings, Identity]:
    """Return the surroundings and the names to hide.

    If git or the name resolution hangs, this takes up to ten seconds.
    """
    fault, canonical, loopback = _own_name()
    folders = {
        "root": Path("/"),
        "home": Path(env.get("HOME") or "/"),
        "runs": runs_dir,
        "data": data_dir,
    }
    # Doctor only looks at these folders and does not write to them.
    folders |= {"temporary": Path("/tmp"), "shared memory": Path("/dev/shm")}  # noqa: S108
    mounts = file_text(Path("/proc/self/mounts"))
    account = _account()
    found = Surroundings(
        software=_software(env),
        python_prefix=sys.prefix,
        signs=container_signs(
            env, file_text(Path("/proc/self/cgroup")), platform.release(), _marks()
        ),
        uid=os.getuid(),
        gid=os.getgid(),
        groups=tuple(sorted({*os.getgroups()} - {os.getgid()})),
        has_passwd_entry=account is not None,
        process_status=dict(
            re.findall(
                r"^(CapEff|NoNewPrivs|Seccomp):\s+(\S+)", file_text(Path("/proc/self/status")), re.M
            )
        ),
        devices=_devices(),
        kernel_module=_first(r"(\d+(?:\.\d+)+)", file_text(Path("/proc/driver/nvidia/version")))
        or "",
        pci_gpus=_pci_gpus(),
        nccl_network=read_infiniband(env).network,
        folders=tuple(
            folder for name, path in folders.items() if (folder := _folder(name, path, mounts))
        ),
        cpus=usable_cpus(),
        host_cpus=os.cpu_count(),
        memory_mib=_memory_mib(),
        memory_limit_mib=_in_mib(_cgroup_limit("memory", "memory.max", "memory.limit_in_bytes")),
        pids_limit=_cgroup_limit("pids", "pids.max", "pids.max"),
        ulimits={name: resource.getrlimit(number) for name, number in _ULIMITS.items()},
        own_name_fault=fault,
        own_name_loopback=loopback,
    )
    return found, _identity(env, account, canonical)


def container_signs(
    env: Mapping[str, str], cgroup: str, kernel: str, marks: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the containers and schedulers whose signs were found. Pure.

    `marks` are the existing marker files, such as /.dockerenv.
    """
    kinds = {
        "docker": "Docker",
        "libpod": "Podman",
        "kubepods": "Kubernetes",
        "containerd": "containerd",
        "lxc": "LXC",
    }
    names = {
        "APPTAINER_NAME": "Apptainer",
        "SINGULARITY_NAME": "Apptainer",
        "KUBERNETES_SERVICE_HOST": "Kubernetes",
        "SLURM_JOB_ID": "a SLURM job",
    }
    signs = [{"/.dockerenv": "Docker", "/run/.containerenv": "Podman"}[mark] for mark in marks]
    signs += [sign for name, sign in names.items() if name in env]
    signs += [sign for kind, sign in kinds.items() if kind in cgroup]
    signs += ["WSL"] if "microsoft" in kernel.lower() else []
    return tuple(dict.fromkeys(signs))


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


def _marks() -> tuple[str, ...]:
    """Return the marker files of container engines that exist."""
    return tuple(mark for mark in ("/.dockerenv", "/run/.containerenv") if Path(mark).exists())


def _software(env: Mapping[str, str]) -> dict[str, str]:
    """Return the names and versions of the software, and the name of the CPU."""
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        system = platform.platform(terse=True)
    cpu = (
        _first(r"^model name\s*: (.*)$", file_text(Path("/proc/cpuinfo")))
        or platform.processor()
        or "unknown"
    )
    libc = " ".join(platform.libc_ver())
    software = {"trainbox": f"{_version('trainbox')}, revision {_revision(env)}"}
    if image := env.get("TRAINBOX_IMAGE_DIGEST"):
        software["image"] = image
    software["python"] = f"{platform.python_version()}, {sys.prefix}"
    packages = (
        f"{name} {_version(name)}" for name in ("torch", "torchvision", "numpy", "nvidia-ml-py")
    )
    return software | {
        "packages": ", ".join(packages),
        "system": f"{system}, kernel {platform.release()} {platform.machine()}, {libc}",
        "CPU": cpu,
    }


def _version(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _revision(env: Mapping[str, str]) -> str:
    """Return the revision from the image's build information, else from git."""
    if baked := env.get("TRAINBOX_BUILD_INFO"):
        try:
            return str(json.loads(Path(baked).read_text(encoding="utf-8"))["revision"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"unknown ({baked}: {type(error).__name__})"
    if not (_ROOT / ".git").exists():
        return "unknown"  # git would describe the user's repository around an installed package
    command = [
        "git",
        "--no-optional-locks",
        "-C",
        str(_ROOT),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_GIT_S
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown (git failed)"


def _devices() -> dict[str, str]:
    """Return NVIDIA's device nodes with this user's access.

    The access comes from the mode of each file. Opening a node would wake a driver that may hang.
    """
    nodes = [node for node in sorted(Path("/dev").glob("nvidia*")) if not node.is_dir()] + list(
        Path("/dev").glob("dxg")
    )
    modes = {"r": os.R_OK, "w": os.W_OK}
    return {
        node.name: "".join(letter for letter, mode in modes.items() if os.access(node, mode))
        for node in nodes
    }


def _pci_gpus() -> int:
    """Return the number of NVIDIA display controllers on the PCI bus."""
    devices = Path("/sys/bus/pci/devices").glob("*")
    kinds = [file_text(d / "class") for d in devices if file_text(d / "vendor").strip() == "0x10de"]
    return sum(kind.startswith(("0x0300", "0x0302")) for kind in kinds)


def _folder(name: str, path: Path, mounts: str) -> Folder | None:
    """Return the properties of the folder `path`, or None if it cannot be examined."""
    absolute = Path(os.path.realpath(path))
    found = nearest(absolute)
    try:
        disk = os.statvfs(found)
    except OSError:
        return None
    return Folder(
        name,
        str(absolute),
        str(found),
        file_system_of(str(found), mounts),
        bool(disk.f_flag & os.ST_RDONLY),
        os.access(found, os.W_OK | os.X_OK),
        disk.f_bavail * disk.f_frsize // _MIB,
        disk.f_blocks * disk.f_frsize // _MIB,
    )


def _memory_mib() -> int | None:
    total_kib = _first(r"^MemTotal: +(\d+) kB", file_text(Path("/proc/meminfo")))
    return int(total_kib) // 1024 if total_kib else None


def _cgroup_limit(controller: str, version_2_file: str, version_1_file: str) -> int | None:
    """Return the lowest limit of this process's cgroup and its parents, or None."""
    texts = [
        file_text(level / (version_2_file if version_2 else version_1_file)).strip()
        for level, version_2 in levels(controller)
    ]
    return min(
        (int(text) for text in texts if text.isdigit() and int(text) < _UNLIMITED), default=None
    )


def _in_mib(size: int | None) -> int | None:
    return None if size is None else size // _MIB


def _own_name() -> tuple[str, str, bool]:
    """Return (why this host's name cannot be resolved, its full name, whether it is loopback).

    A thread resolves the name, because a broken resolver takes minutes.
    """
    answers: list[tuple[str, str, bool]] = []

    def resolve() -> None:
        try:
            found = socket.getaddrinfo(
                socket.gethostname(), None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME
            )
            addresses = {str(entry[4][0]) for entry in found}
            loopback = all(address.startswith("127.") or address == "::1" for address in addresses)
            answers.append(("", found[0][3], loopback))
        except (OSError, UnicodeError) as error:
            answers.append((getattr(error, "strerror", None) or str(error), "", False))

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(_RESOLVE_S)
    return answers[0] if answers else (f"no answer within {_RESOLVE_S:g} s", "", False)


def _account() -> pwd.struct_passwd | None:
    """Return this user's entry in the password database, or None."""
    try:
        return pwd.getpwuid(os.getuid())
    except KeyError:
        return None


def _identity(
    env: Mapping[str, str], account: pwd.struct_passwd | None, canonical: str
) -> Identity:
    """Return the names to hide: homes, users and hosts."""
    homes = [env.get("HOME", ""), account.pw_dir if account else ""]
    homes += [os.path.realpath(home) for home in homes if home]
    users = [
        env.get(name, "")
        for name in ("USER", "LOGNAME", "LNAME", "USERNAME", "SUDO_USER", "SLURM_JOB_USER")
    ]
    users += [account.pw_name if account else ""]
    users += [Path(home).name for home in homes if home.startswith(("/home/", "/Users/"))]
    hosts = (socket.gethostname(), canonical, *other_hosts(env))
    return Identity(tuple(homes), tuple(users), hosts)


def _first(pattern: str, text: str) -> str | None:
    """Return the first group of the first match, or None."""
    match = re.search(pattern, text, re.M)
    return match[1] if match else None
