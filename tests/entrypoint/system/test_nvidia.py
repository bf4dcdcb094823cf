"""The signs of NVIDIA GPUs on a machine whose driver did not load."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from entrypoint.system.nvidia import kernel_module, pci_gpus, unusable_gpus

_GPU = ("0x10de", "0x030200")


def machine(
    root: Path, devices: Sequence[tuple[str, str, str]] = (), files: Sequence[str] = ()
) -> Path:
    """Make PCI devices of (vendor, class, driver), and files."""
    for number, (vendor, kind, driver) in enumerate(devices):
        device = root / f"sys/bus/pci/devices/0000:{number:02d}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
        if driver:
            (root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            (device / "driver").symlink_to(f"../../drivers/{driver}")
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  x\n")
    return root


def test_only_display_controllers_of_nvidia_count(tmp_path: Path) -> None:
    """Its sound devices and NVSwitches, and other vendors, do not."""
    others = [("0x10de", "0x040300", ""), ("0x10de", "0x068000", ""), ("0x8086", "0x030000", "")]
    root = machine(tmp_path, [(*_GPU, ""), ("0x10de", "0x030000", ""), *others])
    assert len(pci_gpus(root)) == 2
    assert kernel_module(root) == ""


@pytest.mark.parametrize(
    ("devices", "files", "seen"),
    [
        ([(*_GPU, "")] * 2, [], "2 NVIDIA GPU(s) on the PCI bus have no driver"),
        ([(*_GPU, "nouveau")], [], "1 NVIDIA GPU(s) on the PCI bus have the driver nouveau"),
        ([], ["dev/nvidia0", "dev/nvidiactl"], "/dev/nvidia0 exists"),
        ([], ["proc/driver/nvidia/version"], "the kernel module 580.95.05 is loaded"),
        ([(*_GPU, "nvidia")], [], ""),
        ([(*_GPU, "vfio-pci")], [], ""),
        ([("0x8086", "0x030000", "i915")], ["dev/nvidia-caps/x", "dev/null"], ""),
        ([], [], ""),
    ],
)
def test_gpus_without_a_working_driver(
    tmp_path: Path, devices: list[tuple[str, str, str]], files: list[str], seen: str
) -> None:
    assert unusable_gpus(False, machine(tmp_path, devices, files)) == seen


def test_a_container_without_gpus_may_be_on_a_machine_with_gpus(tmp_path: Path) -> None:
    """The files of the host's kernel are visible in it."""
    root = machine(tmp_path, [(*_GPU, "nvidia")], ["proc/driver/nvidia/version"])
    assert unusable_gpus(True, root) == ""
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    assert unusable_gpus(True, root) == "/dev/nvidia0 exists"
