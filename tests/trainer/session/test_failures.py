"""Known errors of torch and the system become failures with an exit code."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from tests.support.here import Here
from tests.support.library import raise_in_library
from tests.support.tiny import TINY, Tiny
from trainbox.errors import (
    Failure,
    NetworkFailure,
    OutOfMemory,
    StorageFailure,
    WrongUse,
)
from trainer.records.run_log import RunLog
from trainer.session.failures import errors_as_failures

# fmt: off
_ENDS = [
    (RuntimeError("could not create a primitive descriptor for the LSTM forward propagation"),
     WrongUse, 2, "cannot compute a layer of the model in this precision: use --precision fp32"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has"), OutOfMemory,
     5, "Tried to allocate 2 GiB"),
    (MemoryError(), OutOfMemory, 5,
     "the host's memory is used up: lower --batch-size or --workers"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
     OutOfMemory, 5, "host's memory"),
    (OSError(errno.ENOSPC, "No space left on device", "runs/r/x"), StorageFailure, 4,
     "cannot write runs/r/x: No space left"),
    (OSError(errno.EDQUOT, "Disk quota exceeded", "elsewhere/x"), StorageFailure, 4,
     "Disk quota exceeded"),
    (OSError(errno.EROFS, "Read-only file system"), StorageFailure, 4,
     "cannot write runs: Read-only file system: mount"),
    (PermissionError(errno.EACCES, "Permission denied", "runs/r/x"), StorageFailure, 4,
     "Permission denied"),
    (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"),
     NetworkFailure, 7, "lost contact"),
    (RuntimeError("GET was unable to find an engine to execute this computation"), WrongUse, 2,
     "cuDNN has no algorithm for a convolution (GET was unable to find an engine to execute this "
     "computation): use another --precision, or add --fast"),
    (RuntimeError("unable to allocate shared memory(shm) for file </x>: No space left (28)"),
     StorageFailure, 4, "is too small for the batches of the loader workers"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), OutOfMemory, 5,
     "the host's memory is used up (Cannot allocate memory): lower --batch-size or --workers"),
    (torch.distributed.DistNetworkError("The client socket has timed out"), NetworkFailure, 7,
     "timed out"),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), NetworkFailure, 7,
     "Connection reset by peer"),
]
# fmt: on


@pytest.mark.parametrize(
    ("error", "kind", "code", "text"), _ENDS, ids=lambda value: getattr(value, "__name__", None)
)
def test_known_errors_have_their_exit_code(
    error: Exception, kind: type[Failure], code: int, text: str
) -> None:
    with pytest.raises(kind) as failure, errors_as_failures(Path("runs")):
        raise_in_library(error)
    assert failure.value.exit_code == code
    assert text in str(failure.value)
    assert "\n" not in str(failure.value)
    assert failure.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"),
        RuntimeError("writing to the server: Broken pipe"),
        RuntimeError("unable to allocate shared memory(shm) for file </x>: Too many files (24)"),
        ValueError("x"),
        OSError("odd"),
    ],
)
def test_unknown_errors_are_raised_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, errors_as_failures(Path("runs")):
        raise_in_library(error)
    assert raised.value is error


def test_a_long_error_of_a_task_is_cut(here: Here) -> None:
    def losses(*_: object) -> None:
        raise ValueError("x" * 100_000)

    here.plant(losses=losses)
    err = here.refused("train", TINY, "--device", "cpu", code=WrongUse.exit_code)
    (line,) = (line for line in err.splitlines() if line.startswith("trainbox: task "))
    assert f"raised ValueError: {'x' * 488}... (" in line and "; traceback in " in line


class _Unreadable(Dataset[Any]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        raise OSError(self.number, os.strerror(self.number), "runs/x")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (errno.ENOENT, 2, "__getitem__() raised FileNotFoundError: [Errno 2] No such file"),
        (errno.EROFS, 2, "): write to a folder that is mounted for writing; traceback in "),
        (errno.ENOSPC, 4, "): free some space on the disk of this file; traceback in "),
    ],
)
def test_an_error_of_a_dataset_has_its_code_and_cure_also_in_a_loader_worker(
    here: Here,
    number: int,
    code: int,
    text: str,
    workers: int,
) -> None:
    here.plant(train_dataset=lambda *_: _Unreadable(number))
    words = ("train", TINY, "--device", "cpu", "--workers", f"{workers}")
    assert text in here.refused(*words, code=code)


def test_an_error_that_a_task_raises_again_is_still_that_of_the_library() -> None:
    error = RuntimeError("CUDA error: out of memory")

    def again() -> None:
        try:
            raise_in_library(error)
        except RuntimeError as cause:
            raise RuntimeError(f"in my layer: {cause}") from cause

    used_up = pytest.raises(OutOfMemory, match="the GPU's memory is used up")
    with used_up, errors_as_failures(Path("runs")):
        again()


@pytest.mark.parametrize(
    ("cause", "rest"),
    [("", ""), ("ValueError: no number\n\nThe above exception: ...\n\n", ""), ("", "see b.png\n")],
)
def test_a_failure_of_a_loader_worker_has_its_own_message(cause: str, rest: str) -> None:
    text = (
        f"Caught WrongUse in DataLoader worker process 0.\nOriginal {cause}Traceback (most recent "
        'call last):\n  File "x.py", line 1, in f\ntrainer.errors.WrongUse: a.png is damaged\n'
        f"{rest}"
    )
    with pytest.raises(WrongUse, match=r"^a\.png is damaged$"), errors_as_failures(Path("runs")):
        raise WrongUse(text)


def test_a_keyboard_interrupt_of_a_task_is_an_error(here: Here) -> None:
    def losses(*_: object) -> None:
        raise KeyboardInterrupt

    here.plant(losses=losses)
    err = here.refused("train", TINY, "--device", "cpu", code=1)
    assert err.startswith("trainbox: the task raised KeyboardInterrupt in losses (")


def _cuda_error(code: int, text: str) -> torch.AcceleratorError:
    """Return the error that torch raises for an error of CUDA."""
    error = torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be late")
    error.error_code = code
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (_cuda_error(214, "uncorrectable ECC error encountered"), 3),
        (_cuda_error(710, "device-side assert triggered"), 2),
        (_cuda_error(719, "unspecified launch failure"), 1),  # or 3, if the driver has an Xid
        (
            dist.DistBackendError(
                "NCCL error in: x.cpp:94, unhandled cuda error, NCCL version 2.30.7\n"
                "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
                "Cuda failure 214 'uncorrectable ECC error encountered'"
            ),
            3,
        ),
    ],
    ids=["ECC", "assert", "launch failure", "ECC in NCCL"],
)
def test_an_error_of_cuda_in_a_later_step_has_the_code_of_its_cause(
    here: Here, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: int
) -> None:
    """The state of a GPU that has failed cannot be read, so no checkpoint is saved then."""
    advance, losses, steps = RunLog.advance, Tiny.losses, list[int]()

    def count(run: RunLog) -> None:
        advance(run)
        steps.append(1)

    def fail(task: Tiny, *arguments: Any) -> Any:
        return raise_in_library(error) if len(steps) == 5 else losses(task, *arguments)

    monkeypatch.setattr(RunLog, "advance", count)
    here.plant(losses=fail)
    words = ("train", TINY, "--device", "cpu", "--run", "r", "--checkpoint-steps", "3")
    assert here.command(*words, "--no-rehearsal")[0] == expected
    assert here.steps() == [3]
