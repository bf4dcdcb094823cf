"""Memory and utilisation of the GPUs of a training."""

import logging
from typing import Any

import torch

from trainer.parallel.strategy import Strategy


def gpu_figures(strategy: Strategy) -> dict[str, Any]:
    """Return the memory of all ranks' GPUs and the utilisation of this rank's GPU.

    The result is empty on a CPU. All ranks must call this function. `gpu_memory_mib` is the largest
    of `gpu_memory_mib_each`.
    """
    if strategy.world.device.type != "cuda":
        return {}
    memory_mib = strategy.peak_memory_mib()
    figures: dict[str, Any] = {"gpu_memory_mib": max(memory_mib), "gpu_memory_mib_each": memory_mib}
    try:
        figures["gpu_utilization_percent"] = float(torch.cuda.utilization(strategy.world.device))
    except Exception as error:  # noqa: BLE001 - NVML may be missing or refuse in any way
        logging.getLogger(__name__).info("no utilisation: %s", error)
    return figures
