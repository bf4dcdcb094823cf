"""Whether this machine has a GPU, and which one."""

import ctypes
import os
from collections.abc import Callable, Mapping
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
