"""Digests of tensors: equal if and only if every name, shape, type and bit is."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def tensor_digests(tensors: Mapping[str, Any]) -> dict[str, str]:
    """For each tensor, or a module's extra state, the sha256, in hex, over its type, shape and
    bytes.
    """
    return {name: value_digest(tensor) for name, tensor in tensors.items()}


def tensor_digest(tensor: Tensor) -> str:
    """sha256, in hex, over the type, the shape and the bytes."""
    tensor = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one device have the same type, shape and bytes; NaN is the same as
    itself.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = (
        tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)
    )
    return torch.equal(one, other)


def tensors_digest(tensors: Mapping[str, Any]) -> str:
    """sha256, in hex, over the names and digests of all tensors, in the order of the names."""
    return digest_of_digests(tensor_digests(tensors))


def digest_of_digests(digests: Mapping[str, str]) -> str:
    """sha256, in hex, over the names and digests, in the order of the names."""
    return hashlib.sha256(
        "".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()
    ).hexdigest()


def value_digest(value: Any) -> str:
    """sha256, in hex, of an example or a batch: tensors, arrays, numbers and texts in tuples, lists
    and dicts.
    """
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, dict):
        return digest_of_digests({str(name): value_digest(part) for name, part in value.items()})
    if isinstance(value, tuple | list):
        return digest_of_digests({f"{i:08d}": value_digest(part) for i, part in enumerate(value)})
    # NumPy's arrays and PIL's pictures
    data = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
    return hashlib.sha256(data).hexdigest()
