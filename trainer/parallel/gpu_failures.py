"""Classify the errors of CUDA that show that a GPU is broken or cannot be used."""

import re

import torch

from trainbox.disclosure.suggested_commands import command
from trainbox.errors import DeviceMissing, text_of

_FREE = "stop the other programs on it, which nvidia-smi lists, or use another GPU"
_FABRIC = "start NVIDIA's Fabric Manager (nvidia-fabricmanager) on the host, or use another node"
_OTHER = "give the same command again on another GPU or node, and check this one with `{health}`"

# CUDA's code and text, and the remedy, of the errors that only the machine causes (driver_types.h).
# A mistake in a kernel can also cause others: 700, 719 ("unspecified launch failure"), or 714,
# "hardware stack error", which means a kernel's stack. For these codes, the driver's Xids decide,
# which the entrypoint reads. 3, "initialization error", is a fork that uses the GPU of its parent.
_OF_THE_GPU = {
    46: ("CUDA-capable device(s) is/are busy or unavailable", _FREE),
    214: ("uncorrectable ECC error encountered", _OTHER),
    220: ("uncorrectable NVLink error detected during the execution", _OTHER),
    226: ("Invalid access of peer GPU memory over nvlink or a hardware error", _OTHER),
    802: ("system not yet initialized", _FABRIC),
    999: ("unknown error", _OTHER),
}
_CODES = {text: code for code, (text, _) in _OF_THE_GPU.items()}
# The texts in which these codes appear: of torch (also in the traceback of a loader worker or of a
# DataParallel replica, and at the first call of CUDA), of Triton, and of NCCL.
_TEXT = re.compile(
    r"(?:CUDA (?:driver )?error: |Error \d+: |CUDA (?=unknown)|Triton Error \[CUDA\]: "
    r"|Cuda failure (?:\d+ )?')"
    rf"({'|'.join(map(re.escape, _CODES))})"
)


def gpu_failure(error: BaseException) -> DeviceMissing | None:
    """Return the failure for an error of CUDA that only the machine causes, else None."""
    code = getattr(error, "error_code", None) if isinstance(error, torch.AcceleratorError) else None
    if code is None and (found := _TEXT.search(text_of(error))):
        code = _CODES[found[1]]
    if code not in _OF_THE_GPU:
        return None
    text, remedy = _OF_THE_GPU[code]
    remedy = remedy.format(health=command("health"))
    return DeviceMissing(f"a GPU cannot be used (CUDA error {code}: {text}): {remedy}")
