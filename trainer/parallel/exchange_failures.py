"""Classify the errors of torch.distributed and of its libraries gloo and NCCL."""

import re

import torch.distributed as dist

from trainbox.errors import (
    Failure,
    NetworkFailure,
    OutOfMemory,
    StorageFailure,
    WrongUse,
    text_of,
)

# gloo raises plain RuntimeErrors. They name its source file in brackets, except the errors of
# exchanges that are still open when another one times out. "Wait timeout" is raised by the store in
# a file if another process starts too late. A task's own error may contain a path such as
# /data/gloo/index.json.
_OF_GLOO = re.compile(
    r"\[[^\]\n]*\bgloo/[^\]\n]*\.(cc|cu|h)\b|Application timeout caused pair closure|^Wait timeout$"
)
_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)
_NCCL_LOG = "NCCL_DEBUG=INFO logs more"


def exchange_failure(error: BaseException) -> Failure | None:
    """Return the failure for an error of an exchange between processes, else None.

    Only a lost process and a timeout are network failures, which a scheduler retries. NCCL reports
    other problems of this machine as well, whose reason is in its last line.
    """
    text = text_of(error)
    if isinstance(error, dist.DistBackendError) and "NCCL error" in text:
        return _nccl_failure(text)
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _OF_GLOO.search(text)
    ):
        slow = (
            ": it hangs, or it works longer than this between two exchanges (see Time limits in "
            "docs/reference/faults.md)"
        )
        reason = _first_line(text) + (slow if _TIMED_OUT.search(text) else "")
        return NetworkFailure(f"lost contact with another process: {reason}")
    return None


def _nccl_failure(text: str) -> Failure:
    """Return the failure for the message of an NCCL error."""
    # The first line has the source file of torch and the kind of the error.
    kind = re.search(r"\bnccl(\w+): ", text)
    name = kind[1] if kind else ""
    _, _, last = text.partition("Last error:\n")
    reason = f"{_first_line(text)}: {_first_line(last)}" if last.strip() else _first_line(text)
    if "/dev/shm" in last:  # noqa: S108 - the system's name of it
        return StorageFailure(
            f"NCCL cannot use shared memory ({_first_line(last)}): start the container with "
            "--shm-size=1g (Compose: SHM_SIZE=1gb) or --ipc=host"
        )
    if "ibv_" in last and "Cannot allocate memory" in last:
        return WrongUse(
            f"NCCL cannot lock memory for InfiniBand ({_first_line(last)}): start the container "
            "with --ulimit memlock=-1"
        )
    if "out of memory" in last:
        return OutOfMemory(
            f"the GPU's memory is used up (NCCL: {_first_line(last)}): lower --batch-size, or "
            "raise --accumulation, which splits the same batch into smaller micro-batches"
        )
    if name == "InvalidUsage":
        return WrongUse(f"{reason}: give each process its own GPU; {_NCCL_LOG}")
    if name in ("RemoteError", "SystemError"):
        return NetworkFailure(f"lost contact with another process: {reason}")
    return Failure(f"{reason}: check the GPUs and the driver; {_NCCL_LOG}")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(". ")
