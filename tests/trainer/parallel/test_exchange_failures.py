"""Errors of exchanges get the exit code of their reason, which is in NCCL's last line."""

import pytest
import torch.distributed as dist

from trainbox.errors import Failure, NetworkFailure, OutOfMemory, StorageFailure, WrongUse
from trainer.parallel.exchange_failures import exchange_failure

_SYSTEM = (
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
    "error. ",
)
_SHM = (
    "Error while creating shared memory segment /dev/shm/nccl-Xy (size 9637888), error: No space "
    "left on device (28)"
)
_CUDA = (
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
)


def _nccl(kind: tuple[str, str], last: str) -> dist.DistBackendError:
    """Return an error with the text of torch/csrc/distributed/c10d/NCCLUtils.cpp."""
    return dist.DistBackendError(
        f"NCCL error in: /pytorch/torch/csrc/NCCLUtils.cpp:94, {kind[0]}, NCCL version 2.30.7\n"
        f"{kind[1]}\nLast error:\n{last}\n"
    )


# fmt: off
_ERRORS = [
    (
        _nccl(
            ("remote process exited or there was a network error", "ncclRemoteError: A call"),
            "socketPollConnect: connect to 10.0.0.2<40001> returned Connection refused",
        ),
        NetworkFailure,
        "lost contact with another process: NCCL error in: /pytorch/torch/csrc/NCCLUtils.cpp:94"
        ", remote process exited or there was a network error, NCCL version 2.30.7: "
        "socketPollConnect: connect to 10.0.0.2<40001> returned Connection refused",
    ),
    (_nccl(_SYSTEM, "Call to connect failed: No route to host"), NetworkFailure,
     "NCCL version 2.30.7: Call to connect failed: No route to host"),
    (_nccl(_SYSTEM, _SHM), StorageFailure,
     f"NCCL cannot use shared memory ({_SHM}): start the container with --shm-size=1g (Compose: "
     "SHM_SIZE=1gb) or --ipc=host"),
    (_nccl(_SYSTEM, "Call to ibv_reg_mr failed with error Cannot allocate memory"), WrongUse,
     "cannot lock memory for InfiniBand (Call to ibv_reg_mr failed with error Cannot allocate "
     "memory): start the container with --ulimit memlock=-1"),
    (_nccl(_CUDA, "Cuda failure 2 'out of memory'"), OutOfMemory,
     "the GPU's memory is used up (NCCL: Cuda failure 2 'out of memory'): lower"),
    (_nccl(_CUDA, "Cuda failure 719 'unspecified launch failure'"), Failure,
     "Cuda failure 719 'unspecified launch failure': check the GPUs and the driver"),
    (
        _nccl(
            ("invalid usage", "ncclInvalidUsage: This usually reflects invalid usage"),
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
        ),
        WrongUse,
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000: give each",
    ),
    (_nccl(("internal error", "ncclInternalError: Internal check failed."), ""), Failure,
     "internal error, NCCL version 2.30.7: check the GPUs and the driver; NCCL_DEBUG=INFO"),
    (dist.DistBackendError("[Rank 0] Watchdog caught collective operation timeout: x"),
     NetworkFailure, "Watchdog caught collective operation timeout"),
    (dist.DistStoreError("wait timeout after 600000ms, keys: /x"), NetworkFailure,
     "lost contact with another process: wait timeout after 600000ms, keys: /x"),
    (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] Broken pipe"),
     NetworkFailure, "Broken pipe"),
    (RuntimeError("Application timeout caused pair closure"), NetworkFailure,
     "lost contact with another process: Application timeout caused pair closure: it hangs, or "
     "it works longer than this between two exchanges (see Time limits in "
     "docs/reference/faults.md)"),
    (
        RuntimeError("Wait timeout"),  # another process starts too late
        NetworkFailure,
        "lost contact with another process: Wait timeout: it hangs, or it works longer",
    ),
]
# fmt: on


@pytest.mark.parametrize(("error", "kind", "text"), _ERRORS)
def test_each_reason_has_its_failure(error: RuntimeError, kind: type[Failure], text: str) -> None:
    failure = exchange_failure(error)
    assert type(failure) is kind
    assert text in str(failure)
    assert "\n" not in str(failure)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Broken pipe"),
        RuntimeError("a gloomy day"),
        RuntimeError("Wait timeout of the server"),
        RuntimeError("cannot parse /data/gloo/index.json"),
        RuntimeError("[/data/gloo/part.bin] is not a picture"),
        ConnectionResetError("x"),
    ],
)
def test_an_error_of_another_kind_is_left_to_others(error: Exception) -> None:
    assert exchange_failure(error) is None
