"""Errors of CUDA that only a broken or busy GPU causes have exit code 3, in each form."""

import pytest
import torch
import torch.distributed as dist

from trainbox.errors import DeviceMissing
from trainer.parallel.device import choose_device
from trainer.parallel.gpu_failures import _OF_THE_GPU, gpu_failure

_ECC = "uncorrectable ECC error encountered"


@pytest.mark.skipif(torch.version.cuda is None, reason="torch has no CUDA library")
@pytest.mark.parametrize("code", _OF_THE_GPU)
def test_the_texts_are_those_of_cuda(code: int) -> None:
    assert str(torch.cuda.CudaError(code)) == f"{_OF_THE_GPU[code][0]} ({code})"


@pytest.mark.parametrize("code", _OF_THE_GPU)
def test_the_code_decides(code: int) -> None:
    error = torch.AcceleratorError("CUDA error: as an older version of CUDA calls it")
    assert gpu_failure(error) is None
    error.error_code = code
    failure = gpu_failure(error)
    assert failure is not None and failure.exit_code == 3
    assert str(failure).startswith(f"a GPU cannot be used (CUDA error {code}: ")
    assert (code == 46) == ("): stop the other programs on it, which nvidia-smi " in str(failure))


# fmt: off
_ERRORS = [
    RuntimeError(f"CUDA driver error: {_ECC}"),
    RuntimeError(f"Triton Error [CUDA]: {_ECC}"),
    dist.DistBackendError(f"NCCL error in: x.cpp:94, unhandled cuda error, NCCL version "
     f"2.30.7\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure "
     f"214 '{_ECC}'"),
    torch.AcceleratorError(  # without a code, which torch does not pass on
        "Caught AcceleratorError in pin memory thread for device 0.\nOriginal Traceback (most "
        'recent call last):\n  File "x.py", line 1, in f\n'
        f"torch.AcceleratorError: CUDA error: {_ECC}\nCUDA kernel errors might be reported"
    ),
]
# fmt: on


@pytest.mark.parametrize("error", _ERRORS)
def test_the_text_decides_without_a_code(error: RuntimeError) -> None:
    assert str(gpu_failure(error)) == (
        f"a GPU cannot be used (CUDA error 214: {_ECC}): give the same command again on another "
        "GPU or node, and check this one with `trainbox health`"
    )


# fmt: off
_TEXTS = [
    ("Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
     "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
     802),
    ("CUDA unknown error - this may be due to an incorrectly set up environment", 999),
]
# fmt: on


@pytest.mark.parametrize(("text", "code"), _TEXTS)
def test_the_first_call_of_cuda_has_texts_of_its_own(
    monkeypatch: pytest.MonkeyPatch, text: str, code: int
) -> None:
    def fail() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(DeviceMissing, match=rf"^a GPU cannot be used \(CUDA error {code}: "):
        choose_device("cuda", 0)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (2, "out of memory"),
        (3, "initialization error"),
        (710, "device-side assert triggered"),
        (714, "hardware stack error"),
        (719, "unspecified launch failure"),
    ],
)
def test_what_a_program_causes_as_well_is_left_to_others(code: int, text: str) -> None:
    error = torch.AcceleratorError(f"CUDA error: {text}")
    assert gpu_failure(error) is None
    error.error_code = code
    assert gpu_failure(error) is None
    assert gpu_failure(RuntimeError("the server of cuda.example: unknown errors")) is None
    assert gpu_failure(RuntimeError("unknown error")) is None
