"""One digest for a set of tensors: equal if and only if every name, shape, type and bit is."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256, in hex, over names, types, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
