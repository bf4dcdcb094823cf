"""One rank of a training whose ranks share one GPU: `python -m ... trainer's arguments`.

The environment has torchrun's variables, and these:

- SHARED_BACKEND: the backend for tensors on the GPU, `gloo` or `nccl`
- SHARED_KILL_AT, SHARED_HANG_AT: the rank kills or stops itself after this step of this start
- SHARED_LIMIT_MIB: the rank may reserve this memory on the GPU
- SHARED_TIMEOUT_S: the longest time of a collective
"""

import os
import runpy
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.programs.convolutions import limit_memory
from tests.gpu.programs.training import after_each_step
from trainer.parallel import world


def _signal_at(step: int) -> None:
    for name, number in (("KILL", signal.SIGKILL), ("HANG", signal.SIGSTOP)):
        if os.environ.get(f"SHARED_{name}_AT") == str(step):
            os.kill(os.getpid(), number)


def share_one_gpu() -> None:
    """Let all ranks of this machine use the first GPU."""
    choose, start = world.choose_device, dist.init_process_group

    def first(name: str, _local_rank: int) -> torch.device:
        return choose(name, 0)

    def join(backend: str, *arguments: Any, **options: Any) -> None:
        start(backend.replace("nccl", os.environ["SHARED_BACKEND"]), *arguments, **options)

    world.choose_device = first
    dist.init_process_group = join
    if seconds := os.environ.get("SHARED_TIMEOUT_S"):
        world.TIMEOUT = timedelta(seconds=float(seconds))
    if os.environ["SHARED_BACKEND"] == "gloo":
        # One object of gloo then serves CPU and GPU, so its limit must not be NCCL's limit.
        world._NCCL_TIMEOUT = world.TIMEOUT
    if (limit := os.environ.get("SHARED_LIMIT_MIB")) and torch.cuda.is_available():
        limit_memory(float(limit))


if __name__ == "__main__":
    share_one_gpu()
    with after_each_step(_signal_at):
        runpy.run_module("trainer.__main__", run_name="__main__")
