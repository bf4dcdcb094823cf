"""Work on the tensors of a batch or a state, in nested tuples, lists and dicts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on `device`.

    Pinned tensors are copied while the device computes.
    """
    return mapped(
        lambda tensor: tensor if tensor.device == device else tensor.to(device, non_blocking=True),
        batch,
    )


def copied(batch: Any) -> Any:
    """Return a copy of the batch, for code that may change its tensors in place."""
    return mapped(Tensor.clone, batch)


def take(batch: Any, indices: Tensor) -> Any:
    """Return the examples `indices` of a batch."""
    return mapped(lambda tensor: tensor[indices], batch)


def joined(parts: Sequence[Any], count: int) -> Any:
    """Return the first `count` examples of the batches `parts` as one batch.

    Only batches whose tensors have the same shapes as in the last batch are joined, apart from the
    number of examples (dimension 0). Padded sequences, for example, differ in length.
    """
    tensors = [tensors_in(part) for part in parts]
    shapes = [[tensor.shape[1:] for tensor in part] for part in tensors]
    alike = [part for part, shape in zip(tensors, shapes, strict=True) if shape == shapes[-1]]
    whole = iter([torch.cat(each)[:count] for each in zip(*alike, strict=True)])
    return mapped(lambda _: next(whole), parts[-1])


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    found: list[Tensor] = []
    mapped(found.append, batch)
    return found


def mapped(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return nested tuples, lists and dicts with `function` applied to each tensor, in order."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: mapped(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [mapped(function, value) for value in batch]
        return parts if isinstance(batch, list) else tuple(parts)
    return batch
