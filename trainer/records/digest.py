"""Digests of tensors, which are equal only if all names, shapes, types and bits are equal."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def tensor_digests(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: SHA-256 in hex} of tensors and of the extra state of modules."""
    return {name: value_digest(tensor) for name, tensor in tensors.items()}


def tensor_digest(tensor: Tensor) -> str:
    """Return the SHA-256, in hex, of the tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor_bytes(tensor.cpu()).numpy().data)
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of the tensor's elements in their order, a view if it is contiguous."""
    flat_N = tensor.detach().contiguous().reshape(-1)
    # A tensor of one element is contiguous with any stride, but torch views bytes only with 1.
    return flat_N.as_strided(flat_N.shape, (1,)).view(torch.uint8)


def digest_of_digests(digests: Mapping[str, str]) -> str:
    """Return the SHA-256, in hex, of the sorted names and their digests."""
    return hashlib.sha256(
        "".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()
    ).hexdigest()


def saved_digests(state: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: digest} of the parts of a checkpoint besides the model, for digests.jsonl.

    The measured time is left out, because no two trainings have the same.
    """
    progress = dict(state.get("progress", {}))
    progress.pop("train_seconds", None)
    parts = {**state, "progress": progress}
    return {
        name: value_digest(part)[:16]
        for name, part in parts.items()
        if name not in ("model", "checkpoint")
    }


def value_digest(value: Any) -> str:
    """Return the SHA-256, in hex, of an example or a batch.

    The value may contain tensors, arrays, numbers and strings in nested tuples, lists and dicts.
    """
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, dict):
        return digest_of_digests({_key(name): value_digest(part) for name, part in value.items()})
    if isinstance(value, tuple | list):
        return digest_of_digests({f"{i:08d}": value_digest(part) for i, part in enumerate(value)})
    # NumPy arrays and PIL pictures have tobytes.
    data = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
    return hashlib.sha256(data).hexdigest()


def _key(name: Any) -> str:
    """Return the text of a key, which differs for the number 0 and the text "0"."""
    return repr(name) if isinstance(name, str) and name.isdecimal() else str(name)
