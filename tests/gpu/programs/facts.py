"""Print as JSON which GPU and which libraries this Python has: `python -m ... DEVICE`."""

import json
import os
import platform
import sys
import time
from typing import Any

_BEGIN_S = time.monotonic()

import torch  # noqa: E402 - its time is measured
from torch.nn import functional as F  # noqa: E402

from tests.gpu.machine import shared_memory_mib  # noqa: E402


def facts(device: str) -> dict[str, Any]:
    """Return the facts that the table starts with; raise an error if torch has no GPU."""
    found: dict[str, Any] = {
        "GPU": "none: a dry run on the CPU",
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "CPUs": len(os.sched_getaffinity(0)),
        "/dev/shm": f"{shared_memory_mib()} MiB free",
        "first import of torch": f"{time.monotonic() - _BEGIN_S:.1f} s",
    }
    if device != "cuda":
        return found
    # This raises the reason if CUDA does not work, and reads its libraries from the disk.
    F.conv2d(torch.ones(1, 8, 8, 8, device="cuda"), torch.ones(8, 8, 3, 3, device="cuda")).sum()
    (torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")).sum().item()
    gpu = torch.cuda.get_device_properties(0)
    return found | {
        "GPU": gpu.name,
        "memory": f"{gpu.total_memory / 2**30:.0f} GiB",
        "compute capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "architectures of torch": " ".join(torch.cuda.get_arch_list()),
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "first use of the GPU": f"{time.monotonic() - _BEGIN_S:.1f} s after the import began",
    }


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[1])))
