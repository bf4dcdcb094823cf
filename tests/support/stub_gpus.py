"""Train as the ranks of `Ranks` do; each rank computes on the GPU of the NVML stub with its number.

The command is `python -m tests.support.stub_gpus LIBRARY ARGUMENTS`. In truth, the ranks compute on
the CPU.
"""

import ctypes
import os
import runpy
import sys

from trainer.parallel.strategy import Strategy


def own_gpus(_strategy: Strategy) -> list[tuple[str, str]]:
    """Return the stub's GPU of this rank."""
    return [(f"GPU-00000000-0000-0000-0000-{int(os.environ['RANK']):012d}", "NVIDIA H100")]


def main() -> None:
    """Load the stub, which pynvml then finds by its name, and train."""
    ctypes.CDLL(sys.argv.pop(1), ctypes.RTLD_GLOBAL)
    Strategy.own_gpus = own_gpus  # type: ignore[method-assign]
    sys.argv[0] = "trainer"
    runpy.run_module("trainer", run_name="__main__")


if __name__ == "__main__":
    main()
