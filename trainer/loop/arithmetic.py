"""Set the switches of torch and of CUDA's libraries."""

import os
from contextlib import AbstractContextManager

import torch

from trainbox.options.config import Settings


def set_cuda_variables() -> None:
    """Set the variables that CUDA's libraries read once, so before the first use of a GPU.

    torch reads CUBLAS_WORKSPACE_CONFIG at the first product, and the workspace changes bits.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_arithmetic(config: Settings) -> None:
    """Set torch's switches from `--deterministic`, `--precision`, `--compile` and `--threads`."""
    torch.set_num_threads(config.threads)
    set_tf32(config.precision == "tf32")
    torch.backends.cudnn.benchmark = not config.deterministic
    if config.compile:
        # This also makes the compiler's own kernels deterministic.
        torch.use_deterministic_algorithms(config.deterministic)
    else:
        # The same switch without the import of the compiler.
        torch.set_deterministic_debug_mode("error" if config.deterministic else "default")
    if config.deterministic:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def torchscript_repeats(deterministic: bool) -> AbstractContextManager[None]:
    """Return a context in which a function of TorchScript has the same bits in each call.

    By default, TorchScript fuses operations after the first calls of a function, which changes the
    bits. A resume would then differ, because it begins with first calls again.
    """
    context: AbstractContextManager[None] = torch.jit.optimized_execution(not deterministic)
    return context


def set_tf32(allowed: bool) -> None:
    """Set whether products, convolutions and RNNs of float32 may round to TF32.

    These are torch's older switches. The newer ones (`fp32_precision`) follow them, but not the
    other way round: after the newer ones are set, `torch.backends.cudnn.flags` and the getters of
    the older ones raise an error.
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
