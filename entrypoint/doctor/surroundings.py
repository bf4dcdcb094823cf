"""Read what explains a problem on this machine, and the names that a report must not show.

Nothing is written, and the network is not used.
"""

import importlib.metadata
import os
import pwd
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from entrypoint.doctor.redaction import Hidden, other_hosts, private_names
from entrypoint.system.container import signs_here
from entrypoint.system.nvidia import kernel_module
from entrypoint.system.revision import revision
from trainbox.files.build_info import build_info

_ROOT = Path(__file__).parents[2]
_USER_NAMES = ("USER", "LOGNAME", "LNAME", "USERNAME", "SUDO_USER", "SLURM_JOB_USER")


@dataclass(frozen=True)
class Surroundings:
    """The values of this machine that explain problems.

    Attributes:
        trainbox: the version and the commit of Trainbox.
        signs: the containers and schedulers around this process.
        devices: NVIDIA's nodes in /dev, with this user's access, such as rw.
        kernel_module: the version of NVIDIA's module, empty if it is not loaded.
    """

    trainbox: str
    signs: tuple[str, ...]
    devices: Mapping[str, str]
    kernel_module: str


def read_surroundings(env: Mapping[str, str]) -> tuple[Surroundings, Hidden]:
    """Return the surroundings, and the names to hide."""
    account = _account()
    homes = [home for home in (env.get("HOME"), account and account.pw_dir) if home]
    homes += [os.path.realpath(home) for home in homes]
    users = [env.get(name, "") for name in _USER_NAMES] + [account.pw_name if account else ""]
    users += [Path(home).name for home in homes if home.startswith(("/home/", "/Users/"))]
    hidden = private_names(homes, users, [socket.gethostname(), *other_hosts(env)])
    # Outside of a checkout, git would describe the repository around the installed package.
    checkout = revision(_ROOT) if (_ROOT / ".git").exists() else None
    commit = build_info(env).get("revision") or checkout or "unknown"
    trainbox = f"{importlib.metadata.version('trainbox')}, revision {commit}"
    return Surroundings(trainbox, signs_here(env), _devices(), kernel_module()), hidden


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


def _account() -> pwd.struct_passwd | None:
    """Return this user's entry in the password database, or None."""
    try:
        return pwd.getpwuid(os.getuid())
    except KeyError:
        return None
