"""Print as JSON which GPU and which libraries this Python has: `python -m ... DEVICE`."""

import json
import platform
import sys
from typing import Any

import torch


def facts(device: str) -> dict[str, Any]:
    """Return the facts that the table starts with; raise an error if torch has no GPU."""
    found: dict[str, Any] = {
        "GPU": "none: a dry run on the CPU",
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "Python": platform.python_version(),
        "kernel": platform.release(),
    }
    if device != "cuda":
        return found
    torch.zeros(1, device="cuda")  # raises the reason if CUDA does not work
    gpu = torch.cuda.get_device_properties(0)
    return found | {
        "GPU": gpu.name,
        "memory": f"{gpu.total_memory / 2**30:.0f} GiB",
        "compute capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "architectures of torch": " ".join(torch.cuda.get_arch_list()),
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[1])))
