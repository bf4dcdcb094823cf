"""What torch sees here, as one line of JSON for `trainbox doctor`.

It is a process of its own, since torch takes seconds to start and on a broken driver may hang or
die.
"""

import ctypes
import json
import sys
import warnings
from typing import Any


def seen() -> dict[str, Any]:
    """Versions, GPUs, and in `error` and `warnings` why torch, or CUDA under it, does not start."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it is what is asked
        return {"error": _words(error)}
    answer: dict[str, Any] = {"file": torch.__file__, "libcuda": _libcuda()}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            answer |= _versions(torch)
            torch.cuda.init()
            answer["names"] = [
                torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
            ]
        except Exception as error:  # noqa: BLE001
            answer["error"] = _words(error)
    # not those for programmers
    told = [warning for warning in warned if issubclass(warning.category, UserWarning)]
    return answer | {"warnings": [" ".join(str(warning.message).split()) for warning in told]}


def _versions(torch: Any) -> dict[str, Any]:
    found = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        # Without the first question the second is NVML's answer, which the training never asks.
        "count": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": torch.backends.mps.is_available(),
    }
    if found["cuda"] and sys.platform == "linux":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _libcuda() -> str:
    """Why the driver's part of CUDA cannot be loaded; empty if it can.

    A container may have NVML and not this.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return ""


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    print(json.dumps(seen()), flush=True)
