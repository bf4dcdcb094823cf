"""Raise known errors of torch, the system and a task as Failures with an exit code."""

import contextlib
import errno
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from trainbox.errors import (
    Failure,
    NetworkFailure,
    OutOfMemory,
    WrongUse,
    called_exit,
    raised_interrupt,
    text_of,
)
from trainbox.folders.write_failures import is_of_disk, storage_failure
from trainer.data.sending import shared_memory_full, too_many_tensors
from trainer.loop.out_of_memory import NO_ENGINE, memory_used_up
from trainer.parallel.exchange_failures import exchange_failure
from trainer.parallel.gpu_failures import gpu_failure
from trainer.task_errors import mistake_of, original_error, original_line

_LOADER_SHARED_MEMORY = re.compile(r"shared memory ?\(shm\)[^\n]*No space left")
# The limit of open files (ulimit -n) is reached, because each tensor that a worker sends is a file.
_TOO_MANY_FILES = re.compile(r"Too many open files|received \d+ items of ancdata")
# torch's messages if a loader worker has ended, without its exit code, or the pinning thread.
_LOADER_ENDED = re.compile(
    r"^DataLoader worker.* (exited unexpectedly|is killed by signal)|^Pin memory thread exited",
    re.MULTILINE,
)

# A part of torch's message, and the message that the user gets instead.
_WRONG_USES = {
    "mixed torch.Tensor and DTensor": (
        "--strategy fsdp gathers a block's weights only during the block's own forward, and the "
        "task or the model uses some elsewhere: call the block (each module of a ModuleList or "
        "Sequential is a block), or use --strategy ddp"
    ),
    "could not create a primitive": (  # such as an LSTM in bf16 on a CPU without AVX-512
        "this CPU cannot compute a layer of the model in this precision: use --precision fp32"
    ),
    "Sharding propagation failed": (  # only the optimizer computes with shards of tensors
        "--strategy fsdp does not support this optimizer, whose step torch cannot compute on "
        "shares of tensors: use another optimizer such as AdamW, or use --strategy ddp"
    ),
}


@contextlib.contextmanager
def errors_as_failures(
    runs_dir: Path, task: str = "", log: Path | None = None, instead: str | None = None
) -> Iterator[None]:
    """Raise known errors of the body as Failures. Unknown errors are raised unchanged.

    Args:
        runs_dir: the folder of the runs; an error of its disk is a StorageFailure.
        task: the name of the task whose code runs in the body; "" if none does, so that no error
            is reported as a mistake of the task.
        log: the log of this rank, which gets the traceback; None for no log.
        instead: how the user can choose another folder, for the message of a StorageFailure.
    """
    try:
        yield
    except Failure as known:
        if line := original_line(known):
            raise type(known)(line.partition(": ")[2]) from known
        raise
    except SystemExit as end:
        raise called_exit(end) from end
    except KeyboardInterrupt as interrupt:
        # At Ctrl-C, Trainbox's handler raises nothing, so the task raised this KeyboardInterrupt.
        raise raised_interrupt(interrupt) from interrupt
    except Exception as error:
        if log is not None:
            logging.getLogger(__name__).exception("stopped by an error")
        failure, source = _of_the_machine(error), original_error(error)
        if failure is None and task:
            failure = mistake_of(error, task, log)
        if failure is None and isinstance(source, OSError) and is_of_disk(source, runs_dir):
            failure = storage_failure(runs_dir, source, instead=instead)
        # A task may connect to a server. Other connections are between Trainbox's processes.
        if failure is None and isinstance(error, ConnectionError):
            failure = NetworkFailure(f"lost contact with another process: {text_of(error)}")
        if failure is None:
            raise
        raise failure from error


def _of_the_machine(error: Exception) -> Failure | None:
    """Return the failure for an error of torch or of memory, or None."""
    source = original_error(error)
    if isinstance(source, OSError) and source.errno == errno.EMFILE:
        return too_many_tensors()
    if isinstance(error, RuntimeError) and (
        failure := gpu_failure(error) or exchange_failure(error)
    ):
        return failure
    if found := memory_used_up(error):
        workers = " or --workers" if "host" in found.partition("(")[0] else ""
        return OutOfMemory(
            f"{found}: lower --batch-size{workers}, or raise --accumulation, which splits the "
            "same batch into smaller micro-batches"
        )
    if not isinstance(error, RuntimeError):
        return None
    # torch raises an error about a worker `from` the error that has the cause.
    cause = "" if error.__cause__ is None else text_of(error.__cause__)
    return _of_torch(f"{cause}\n{text_of(error)}")


def _of_loaders(text: str) -> Failure | None:
    """Return the failure for loader workers that lack memory or files, or that have ended."""
    if _LOADER_SHARED_MEMORY.search(text):
        return shared_memory_full()
    if _TOO_MANY_FILES.search(text):
        return too_many_tensors()
    if not _LOADER_ENDED.search(text):
        return None
    return Failure(
        "a loader worker exited: the dataset or a library has ended it, or the system is out of "
        "memory: use --workers 0 to see where, or lower --workers or --batch-size"
    )


def _of_torch(text: str) -> Failure | None:
    """Return the failure for the `text` of an error of torch, or None if it is not known."""
    if failure := _of_loaders(text):
        return failure
    for sign, message in _WRONG_USES.items():
        if sign in text:
            return WrongUse(message)
    for line in text.splitlines():
        if "does not have a deterministic implementation" in line:
            return WrongUse(f"{line} Add --fast, which does not guarantee the same bits")
        if NO_ENGINE in line:  # memory_used_up has excluded a lack of memory
            return WrongUse(
                f"cuDNN has no algorithm for a convolution ({line}): use another --precision, or "
                "add --fast, which does not guarantee the same bits"
            )
    return None
