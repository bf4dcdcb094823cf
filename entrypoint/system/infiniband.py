"""The network that NCCL uses between nodes: InfiniBand or RoCE, or without a message TCP."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from entrypoint.system.cgroup import file_text

_LIBRARY = "libibverbs.so.1"
# By the link layer of a port. NCCL needs a plugin for others, such as Amazon's EFA.
_KINDS = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}
_ACTIVE = "4:"


@dataclass(frozen=True)
class InfiniBand:
    """What decides whether NCCL uses InfiniBand or RoCE.

    Attributes:
        selected: the network that a variable of NCCL selects, or empty.
        devices: the kind of each device with an active port that this user may open, by its name.
        fault: why the library for the devices cannot be loaded, or empty.
    """

    selected: str = ""
    devices: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""

    @property
    def network(self) -> str:
        """Return the network that NCCL uses between nodes, and the reason if it is TCP."""
        if self.selected:
            return self.selected
        if not self.devices:
            return "TCP, or over a plugin (no active port of InfiniBand or RoCE)"
        kinds = " and ".join(sorted(set(self.devices.values())))
        found = f"{kinds} ({' '.join(self.devices)})"
        return f"TCP instead of {found}: {self.fault}" if self.fault else found


def read_infiniband(env: Mapping[str, str], root: Path = Path("/")) -> InfiniBand:
    """Return the network that `env` selects, else the devices below `root`."""
    if selected := _selected(env):
        return InfiniBand(selected)
    devices = {}
    for node in sorted((root / "dev/infiniband").glob("uverbs*")):
        name = file_text(root / "sys/class/infiniband_verbs" / node.name / "ibdev").strip()
        for port in sorted((root / "sys/class/infiniband" / name / "ports").glob("*")):
            kind = _KINDS.get(file_text(port / "link_layer").strip())
            is_active = file_text(port / "state").startswith(_ACTIVE)
            if kind and is_active and os.access(node, os.R_OK | os.W_OK):
                devices[name] = kind
    return InfiniBand(devices=devices, fault=_load_fault() if devices else "")


def _selected(env: Mapping[str, str]) -> str:
    net, disabled = env.get("NCCL_NET", ""), env.get("NCCL_IB_DISABLE", "")
    if net.lower() not in ("", "ib"):
        return f"{'TCP' if net.lower() == 'socket' else 'a plugin'} (NCCL_NET={net})"
    return "" if disabled in ("", "0") else f"TCP (NCCL_IB_DISABLE={disabled})"


def _load_fault() -> str:
    import ctypes  # takes milliseconds, and few machines have such a device

    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return str(error)
    return ""
