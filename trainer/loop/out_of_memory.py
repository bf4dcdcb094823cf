"""A batch that does not fit in memory: noticed at the first steps by all processes together, and
cut into smaller parts.

Why so, and what was left: docs/decisions/0010-a-batch-that-does-not-fit.md.
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

# from the second on the optimizer's state is there, and with it all that a step needs
FIRST_STEPS = 2

_GPU_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_HOST_SIGN = "can't allocate memory"  # torch has no class of its own for it


class DoesNotFit(Exception):
    """On this process or another the memory was used up; raised on all of them, in the same
    step.
    """


def memory_used_up(error: BaseException) -> str | None:
    """Whose memory, in words, with the library's own first ones; None if `error` is something
    else.
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
    """Around work that exchanges nothing: the processes agree at its end on whether it fitted on
    each.

    Raises:
        DoesNotFit: on all of them.
    """
    if strategy.forward_is_collective:  # the other ranks wait in a forward and cannot answer
        yield
        return
    found = None
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        found = memory_used_up(error)
        if found is None:
            raise
    # Only here, so that the error, which holds the step's memory, is gone.
    for rank, text in enumerate(strategy.world.from_each(found)):
        if text is not None:
            raise DoesNotFit(f"process {rank}: {text}" if strategy.world.world_size > 1 else text)


def in_smaller_parts(config: Settings, model: nn.Module, found: str, fixed: str | None) -> Settings:
    """`config` with a batch in twice as many parts, or in as many as there can be; the batch stays.

    Raises:
        OutOfMemory: there can be no more, or `fixed` says why there may not.
    """
    at_once, least = examples_at_once(config), 2 if has_batch_norm(model) else 1
    most_parts = config.batch_size // config.shards // least
    if fixed is not None:
        raise OutOfMemory(f"{found} with {at_once} example(s) at once; {fixed}")
    if config.accumulation >= most_parts:
        raise OutOfMemory(
            f"{found} with {at_once} example(s) at once, and "
            + ("batch norm needs two" if least == 2 else "there is nothing left to cut")
            + ": make the model or the examples smaller, or use --precision bf16 or a device "
            "with more memory"
        )
    return dataclasses.replace(config, accumulation=min(2 * config.accumulation, most_parts))


def examples_at_once(config: Settings) -> int:
    """The most that one forward sees."""
    return -(-config.batch_size // (config.shards * config.accumulation))


def has_batch_norm(model: nn.Module) -> bool:
    """Whether some of its figures are those of the examples that are computed together."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def free_memory() -> None:
    """What was let go of, on the GPU too."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
