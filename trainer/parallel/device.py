"""The torch device of a rank."""

import warnings

import torch

from trainbox.disclosure.suggested_commands import command
from trainbox.errors import DeviceMissing, WrongUse
from trainbox.processes.architectures import without_code
from trainer.parallel.gpu_failures import gpu_failure


def _refuse_without_code(index: int) -> None:
    """Raise DeviceMissing if the installed torch has no kernels for the GPU's architecture.

    `trainbox` checks this before the start; this is for a rank that was started without it.
    """
    if torch.version.cuda is None:
        return  # the names of other builds' architectures, such as ROCm's, have other rules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch describes the same mismatch in several lines
        capability = torch.cuda.get_device_capability(index)
    if reason := without_code(capability, torch.cuda.get_arch_list()):
        raise DeviceMissing(
            f"torch has no code for GPU {index}, {torch.cuda.get_device_name(index)} ({reason}): "
            "use other GPUs, an image whose torch is built for this architecture, or --device cpu"
        )


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return the torch device for `auto`, `cuda`, `mps` or `cpu`.

    Raises:
        DeviceMissing: Torch does not find the device, or has no code for it.
        WrongUse: Several processes would use one Apple GPU.
    """
    if name == "auto":
        name = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    if name == "cuda":
        try:
            torch.cuda.init()
            count, reason = torch.cuda.device_count(), ""
        except (AssertionError, RuntimeError) as error:  # an assertion if torch has no CUDA
            if failure := gpu_failure(error):
                raise failure from error
            count, reason = 0, f" ({str(error).partition(chr(10))[0].rstrip('. ')})"
        if local_rank >= count:
            raise DeviceMissing(
                f"process {local_rank} was given a GPU, but torch {torch.__version__} (CUDA "
                f"{torch.version.cuda}) finds {count} GPUs{reason}: update the driver if it is too "
                "old for this image, or restart the container if it has lost its GPUs; see "
                f"`{command('health')}`"
            )
        _refuse_without_code(local_rank)
        return torch.device("cuda", local_rank)
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise DeviceMissing(
                "--device mps requested, but torch does not find an Apple GPU: use --device cpu"
            )
        if local_rank > 0:
            raise WrongUse(
                "--device mps is one GPU, but several processes are requested: use --device "
                "cpu, or 1 process"
            )
    return torch.device(name)
