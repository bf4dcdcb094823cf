"""Split a batch that does not fit in memory into smaller micro-batches.

All ranks agree on this in the first steps. The reasons are in
docs/decisions/0010-a-batch-that-does-not-fit.md.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.errors import OutOfMemory
from trainer.parallel.strategy import Strategy
from trainer.settings.config import Settings

# The second step is the first one with the optimizer's state, and so with all that a step needs.
FIRST_STEPS = 2

_GPU_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_HOST_SIGN = "can't allocate memory"  # torch raises a plain RuntimeError


class DoesNotFit(Exception):
    """Memory that is used up on some rank, raised on all ranks in the same step."""


def memory_used_up(error: BaseException) -> str | None:
    """Return a message if `error` means that memory is used up, else None.

    The message names the host or the GPU, and it quotes the first line of the library's message.
    """
    text = str(error).partition("\n")[0]
    if isinstance(error, MemoryError):
        return f"the host's memory is used up ({text})" if text else "the host's memory is used up"
    if not isinstance(error, RuntimeError):
        return None
    if _HOST_SIGN in text:
        return f"the host's memory is used up ({text})"
    if isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in _GPU_SIGNS):
        return f"the GPU's memory is used up ({text})"
    return None


@contextlib.contextmanager
def all_fit(strategy: Strategy) -> Iterator[None]:
    """Let all ranks agree, after the body, on whether its work fitted in memory.

    The body must not exchange anything between ranks.

    Raises:
        DoesNotFit: The memory of some rank is used up. All ranks raise it.
    """
    if strategy.forward_is_collective:  # the other ranks wait in a forward and cannot vote
        yield
        return
    found = None
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        found = memory_used_up(error)
        if found is None:
            raise
    # Exchange after the `except` block, when the error no longer keeps the memory of the step.
    for rank, text in enumerate(strategy.world.from_each(found)):
        if text is not None:
            raise DoesNotFit(f"process {rank}: {text}" if strategy.world.world_size > 1 else text)


def with_smaller_micro_batches(
    config: Settings, model: nn.Module, found: str, fixed: str | None
) -> Settings:
    """Return `config` with twice as many micro-batches, or with the largest possible number.

    The batch size does not change. `found` is the message of `memory_used_up`.

    Raises:
        OutOfMemory: The batch cannot be split further, or must not be, for the reason `fixed`.
    """
    at_once, least = examples_at_once(config), 2 if has_batch_norm(model) else 1
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
