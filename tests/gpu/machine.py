"""Whether this machine has a GPU, and what the checks need besides."""

import ctypes
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Of CUDA's driver library: no device, and a library that is only for linking.
_WITHOUT_GPU = {100: "the driver lists no GPU", 34: "libcuda.so.1 is only for linking"}
DRY_RUN = "TRAINBOX_TEST_GPU_DEVICE"  # set to `cpu` by the tests of this suite, and by hand


def no_gpu(load: Callable[[str], Any] = ctypes.CDLL) -> str | None:
    """Return why this machine has no GPU, or None if it has one.

    A driver that fails in another way is a GPU that does not work, so the checks run and fail.
    This does not import torch, so that a machine without a GPU answers at once.
    """
    try:
        code = load("libcuda.so.1").cuInit(0)
    except OSError:
        return "no GPU: this machine has no NVIDIA driver (libcuda.so.1 is not found)"
    reason = _WITHOUT_GPU.get(code)
    return f"no GPU: {reason}" if reason else None


def device(environment: Mapping[str, str] = os.environ) -> str:
    """Return the device of the checks: `cuda`, or `cpu` in a dry run."""
    return environment.get(DRY_RUN, "cuda")


def first_gpu(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that show one GPU to a check, the first that this process may use."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0")
    order = environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[0], "CUDA_DEVICE_ORDER": order}


def no_compiler(device: str) -> str | None:
    """Return what `torch.compile` needs and this machine does not have, or None."""
    if not any(map(shutil.which, ("cc", "gcc", "g++", "clang"))):
        return "no C compiler on PATH, which torch.compile needs"
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "this Python has no triton"
    # triton compiles its launchers, and inductor its code for the CPU.
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "no Python.h, which torch.compile needs: install the headers of this Python"
    return None


def shared_memory_mib() -> int:
    """Return the free MiB of /dev/shm, through which loader workers send their batches."""
    try:
        return shutil.disk_usage("/dev/shm").free // 2**20
    except OSError:  # this system does not use /dev/shm
        return 2**20
