"""Split a batch that does not fit in memory into smaller micro-batches.

All ranks agree on this in the first steps. The reasons are in
docs/decisions/0010-a-batch-that-does-not-fit.md.
"""

import contextlib
import dataclasses
import errno
import gc
import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainbox.errors import Failure, OutOfMemory, text_of
from trainbox.options.config import CHANNELS_LAST, Settings
from trainer.loop.memory_format import NeedsContiguous
from trainer.parallel.strategy import Strategy
from trainer.task_errors import original_error

# The second step is the first one with the optimizer's state, and so with all that a step needs.
FIRST_STEPS = 2

# For these errors torch raises a plain RuntimeError. The signs come from CUDA, from its libraries
# (such as CUBLAS_STATUS_ALLOC_FAILED and CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED),
# from MAGMA, and from mmap in a loader worker.
_GPU_SIGN = re.compile(
    "(?i)out of memory|[A-Z]_ALLOC_FAILED|(DEVICE|STATUS)_ALLOCATION_FAILED"
    "|cusparse: allocation failed|cannot allocate memory on GPU|not enough memory for workspace"
)
# Libraries of the host may report "out of memory" as well.
_OF_A_GPU = re.compile("(?i)cuda|cudnn|cublas|cusolver|cusparse|cufft|hip|mps|gpu")
_HOST_SIGN = re.compile("(?i)can(no|')t allocate memory|HOST_ALLOCATION_FAILED")
# torch tries the algorithms of cuDNN in turn, and hides their errors. So this message may mean that
# cuDNN has no algorithm, or that the workspace of each algorithm does not fit in memory.
NO_ENGINE = "unable to find an engine to execute this computation"


def memory_used_up(error: BaseException, failed_before: int = 0) -> str | None:
    """Return a message if `error` means that memory is used up, else None.

    The message names the host or the GPU, and it quotes the first line of the library's message.
    `failed_before` is the number of failed allocations before the work that raised `error`.
    """
    failed = failed_allocations() - failed_before
    lines = text_of(error).splitlines() or [""]
    if isinstance(error, MemoryError):
        text = f" ({lines[0]})" if lines[0] else ""
        return f"the host's memory is used up{text}"
    source = original_error(error)
    if isinstance(source, OSError) and source.errno == errno.ENOMEM:
        return f"the host's memory is used up ({source.strerror})"
    if isinstance(error, torch.OutOfMemoryError):
        return f"the GPU's memory is used up ({lines[0]})"
    if isinstance(error, RuntimeError):
        # The error of a DataParallel replica or of a loader worker ends with the original message.
        for line in lines:
            if owner := _memory_of(line, failed):
                return f"the {owner}'s memory is used up ({line})"
    return None


def _memory_of(line: str, failed: int) -> str | None:
    """Return "GPU" or "host" if the library's message means that this memory is used up."""
    if NO_ENGINE in line and failed:
        return "GPU"
    if _GPU_SIGN.search(line):
        uses_gpu = torch.cuda.is_initialized() or torch.backends.mps.is_available()
        return "GPU" if uses_gpu or _OF_A_GPU.search(line) else "host"
    return "host" if _HOST_SIGN.search(line) and "shared memory" not in line else None


def failed_allocations() -> int:
    """Return how many allocations of GPU memory have failed in this process.

    This includes errors that torch hides: if the workspace of a convolution does not fit, torch
    takes another algorithm of cuDNN, which has other bits. The process then keeps this algorithm
    for this shape, also when there is more memory (aten/src/ATen/native/cudnn/Conv_v8.cpp).
    """
    if not torch.cuda.is_initialized():
        return 0
    return sum(
        int(torch.cuda.memory_stats(index).get("num_ooms", 0))
        for index in range(torch.cuda.device_count())
    )


def failed_allocations_change_bits(strategy: Strategy) -> bool:
    """Return whether the run promises bits that a failed allocation would change."""
    return strategy.world.device.type == "cuda" and torch.are_deterministic_algorithms_enabled()


@contextlib.contextmanager
def all_fit(strategy: Strategy, memory_format: str | None = None) -> Iterator[None]:
    """Let all ranks agree, after the body, on whether its work fitted in memory.

    The body must not exchange anything between ranks, except through `World.wait_for_all`.

    Raises:
        OutOfMemory: The memory of some rank is used up. All ranks raise it.
        NeedsContiguous: The body failed on some rank, and its pictures had the channels last. All
            ranks raise it.
    """
    if strategy.forward_is_collective:  # the other ranks wait in a forward and cannot vote
        yield
        return
    watches, before = failed_allocations_change_bits(strategy), failed_allocations()
    failed: Exception | None = None
    try:
        yield
        hidden = failed_allocations() - before if watches else 0
        text = f"the GPU's memory is used up ({hidden} allocation(s) failed, and cuDNN took "
        text += "algorithms that need less memory and have other bits, which only --fast allows)"
        found = text if hidden else None
    except Exception as error:
        found = memory_used_up(error, before)
        is_of_the_format = memory_format == CHANNELS_LAST and not isinstance(
            error, Failure | torch.AcceleratorError
        )
        if found is None and not is_of_the_format:
            raise
        failed = error if found is None else None
    # Exchange after the `except` block, when the error no longer keeps the memory of the step.
    votes = strategy.world.from_each([found, failed is not None])
    for rank, (text, _) in enumerate(votes):
        if text is not None:
            raise OutOfMemory(f"process {rank}: {text}" if strategy.world.world_size > 1 else text)
    if any(fails for _, fails in votes):
        raise NeedsContiguous("a process failed with the channels last") from failed


def with_smaller_micro_batches(
    config: Settings, batch_norm: bool, found: str, fixed: str | None
) -> Settings:
    """Return `config` with twice as many micro-batches, or with the largest possible number.

    The batch size does not change. `batch_norm` is true if the model has batch norm. `found` is the
    message of `memory_used_up`.

    Raises:
        OutOfMemory: The batch cannot be split further, or must not be, for the reason `fixed`.
    """
    at_once, least = examples_at_once(config), 2 if batch_norm else 1
    most = config.batch_size // config.shards // least
    if fixed is not None:
        raise OutOfMemory(f"{found} with {at_once} example(s) at once; {fixed}")
    if config.accumulation >= most:
        raise OutOfMemory(
            f"{found} with {at_once} example(s) at once, and "
            + ("batch norm needs two" if least == 2 else "a micro-batch cannot be smaller")
            + ": make the model or the examples smaller, or use --precision bf16 or a device "
            "with more memory"
        )
    return dataclasses.replace(config, accumulation=min(2 * config.accumulation, most))


def examples_at_once(config: Settings) -> int:
    """Return the largest number of examples in one forward."""
    return -(-config.batch_size // (config.shards * config.accumulation))


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether the model has batch norm, whose output depends on the whole micro-batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def free_memory() -> None:
    """Free the memory of unused objects, including the GPU memory that torch caches."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
