"""Raise known errors of torch, the system and a task as Failures with an exit code."""

import contextlib
import errno
import logging
from collections.abc import Iterator
from pathlib import Path

from trainer.errors import Failure, NetworkFailure, OutOfMemory, WrongUse, called_exit
from trainer.loop.out_of_memory import memory_used_up
from trainer.loop.shared_memory import shared_memory_full
from trainer.parallel.world import is_network_error
from trainer.system.storage import storage_failure
from trainer.task_errors import mistake_of

# Part of torch's message, and the message for the user.
_WRONG_USES = {
    "stack expects each tensor to be equal size": (
        "the dataset's examples have different shapes and cannot be batched: pad or crop them in "
        "__getitem__"
    ),
    "mixed torch.Tensor and DTensor": (
        "--strategy fsdp gathers a block's weights only during the block's own forward, and the "
        "task or the model uses some elsewhere: call the block (each module of a ModuleList or "
        "Sequential is a block), or use --strategy ddp"
    ),
    "Sharding propagation failed": (  # only the optimizer computes with shards of tensors
        "--strategy fsdp does not support this optimizer, whose step torch cannot compute on "
        "shares of tensors: use another optimizer such as AdamW, or use --strategy ddp"
    ),
}


@contextlib.contextmanager
def errors_as_failures(runs_dir: Path, task: str = "", log: Path | None = None) -> Iterator[None]:
    """Raise known errors of the body as Failures. Unknown errors are raised unchanged.

    The traceback goes to the log of this rank, whose path is `log`. Without `log`, no error is
    attributed to the task.
    """
    try:
        yield
    except Failure:
        raise
    except SystemExit as end:
        raise called_exit(end) from end
    except Exception as error:
        if log is not None:
            logging.getLogger(__name__).exception("stopped by an error")
        failure = _torch_failure(error) if isinstance(error, MemoryError | RuntimeError) else None
        if isinstance(error, OSError):
            failure = _system_failure(error, runs_dir)
        if failure is None and log is not None:
            failure = mistake_of(error, task, log)
        if failure is None:
            raise
        raise failure from error


def _system_failure(error: OSError, runs_dir: Path) -> Failure | None:
    """Return the failure for a lost process or for the run's storage, and None otherwise.

    An example of None is an error of the user's own file.
    """
    if isinstance(error, ConnectionError):
        return NetworkFailure(f"lost contact with another process: {error}")
    if str(error.filename or "").startswith(str(runs_dir)) or error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
    ):
        return storage_failure(runs_dir, error)
    return None


def _torch_failure(error: MemoryError | RuntimeError) -> Failure | None:
    """Return the failure for an error of torch that has no class of its own, or None."""
    text, first_line = str(error), str(error).partition("\n")[0]
    if found := memory_used_up(error):
        workers = " or --workers" if "host" in found.partition("(")[0] else ""
        return OutOfMemory(
            f"{found}: lower --batch-size{workers}, or raise --accumulation, which splits the "
            "same batch into smaller micro-batches"
        )
    if "shared memory" in text:  # a loader worker could not allocate it, or had a bus error
        return shared_memory_full()
    for sign, message in _WRONG_USES.items():
        if sign in text:
            return WrongUse(message)
    if "does not have a deterministic implementation" in text:
        return WrongUse(f"{first_line} Add --fast, which does not guarantee the same bits")
    if is_network_error(error):
        return NetworkFailure(f"lost contact with another process: {first_line}")
    return None
