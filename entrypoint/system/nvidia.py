"""NVIDIA GPUs as Linux lists them, without the driver's library."""

import re
from pathlib import Path

from entrypoint.system.cgroup import file_text

_ROOT = Path("/")
# Drivers that keep a GPU for a virtual machine.
_OF_GUESTS = ("vfio-pci", "pci-stub")


def pci_gpus(root: Path = _ROOT) -> list[Path]:
    """Return NVIDIA's display controllers on the PCI bus."""
    found = sorted((root / "sys/bus/pci/devices").glob("*"))
    return [
        device
        for device in found
        if file_text(device / "vendor").strip() == "0x10de"
        and file_text(device / "class").startswith(("0x0300", "0x0302"))
    ]


def kernel_module(root: Path = _ROOT) -> str:
    """Return the version of NVIDIA's kernel module, or "" if it is not loaded."""
    found = re.search(r"\d+(?:\.\d+)+", file_text(root / "proc/driver/nvidia/version"))
    return found[0] if found else ""


def given_gpus(is_container: bool, root: Path = _ROOT) -> str:
    """Return what shows that this process was given GPUs, although NVML finds no driver, or "".

    A container without device files was started without GPUs, also if the host's driver works.
    """
    files = sorted(path.name for path in (root / "dev").glob("nvidia*"))
    if given := [name for name in files if re.fullmatch(r"nvidia(ctl|\d+)", name)]:
        return f"/dev/{given[0]} exists"
    if not is_container and (version := kernel_module(root)):
        return f"the kernel module {version} is loaded"
    return ""


def unusable_gpus(is_container: bool, root: Path = _ROOT) -> str:
    """Return what shows that this machine has GPUs, although NVML finds no driver, or ""."""
    if given := given_gpus(is_container, root):
        return given
    gpus = pci_gpus(root)
    drivers = [device.joinpath("driver").resolve().name for device in gpus]
    others = [name for name in drivers if name != "nvidia" and name not in _OF_GUESTS]
    if others:
        used = sorted({name for name in others if name != "driver"})
        by = f"the driver {', '.join(used)}" if used else "no driver"
        return f"{len(others)} NVIDIA GPU(s) on the PCI bus have {by}"
    return ""
