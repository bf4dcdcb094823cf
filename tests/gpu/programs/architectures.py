"""Compare torch's architectures as the launcher reads them with the list that torch reports."""

from collections.abc import Iterator
from typing import Any

import torch

from entrypoint.system.torch_build import torch_architectures
from trainbox.processes.architectures import without_code


def measure(device: str) -> Iterator[tuple[str, Any]]:
    yield "launcher", list(torch_architectures())
    yield "torch", torch.cuda.get_arch_list()
    if device == "cuda":
        capability = torch.cuda.get_device_capability(0)
        yield "refusal", without_code(capability, torch_architectures()) or None
