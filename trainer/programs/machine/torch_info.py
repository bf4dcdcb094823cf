"""Print what torch finds on this machine as one line of JSON for `trainbox doctor`.

This is a separate process, because torch takes seconds to start and may hang or crash on a broken
driver.
"""

import ctypes
import json
import warnings
from typing import Any


def seen() -> dict[str, Any]:
    """Return torch's version and the number of its GPUs.

    If torch or CUDA does not start, `error` and `warnings` have the reason.
    """
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - any error is an answer
        return {"error": _one_line(error)}
    answer: dict[str, Any] = {"libcuda": _libcuda()}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            answer |= {"version": torch.__version__, "cuda": torch.version.cuda}
            # Without is_available(), device_count() would ask NVML, which trainings do not use.
            answer["count"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
            torch.cuda.init()
        except Exception as error:  # noqa: BLE001
            answer["error"] = _one_line(error)
    # Leave out warnings for developers, such as deprecations.
    shown = [warning for warning in warned if issubclass(warning.category, UserWarning)]
    return answer | {"warnings": [" ".join(str(warning.message).split()) for warning in shown]}


def _libcuda() -> str:
    """Return why the driver's CUDA library cannot be loaded, or an empty string.

    A container may have NVML without this library.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return ""


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    print(json.dumps(seen()), flush=True)
