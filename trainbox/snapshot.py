"""Copy the state of a training, so that a thread can write it to a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainbox.pinned import pinned_like


class Snapshot:
    """A copy of a training's state, in buffers that are kept between saves.

    A copy into fresh memory would take several times as long.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def allocate(self, state: Mapping[str, Any]) -> None:
        """Get the buffers for states like `state`."""
        self._buffers_for(list(tensors_of(state)))

    @torch.no_grad()
    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of `state` on the CPU, valid until the next call."""
        tensors = list(tensors_of(state))
        if tensors:  # torch refuses an empty list
            torch._foreach_copy_(self._buffers_for(tensors), tensors, non_blocking=True)
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        copies = iter(self._buffers)
        return {name: _rebuild(value, copies) for name, value in state.items()}

    def _buffers_for(self, tensors: list[Tensor]) -> list[Tensor]:
        if [_layout(t) for t in tensors] != [_layout(t) for t in self._buffers]:
            self._buffers = []  # free the old ones first
            on_gpu = [tensor for tensor in tensors if tensor.device.type == "cuda"]
            pinned = iter(pinned_like(on_gpu) if on_gpu else [])
            # Zeros instead of empty memory, so that the pages are allocated now.
            self._buffers = [
                next(pinned)
                if tensor.device.type == "cuda"
                else torch.zeros_like(tensor, device="cpu", requires_grad=False)
                for tensor in tensors
            ]
        return self._buffers


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists and tuples, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_of(value)


def _rebuild(tree: Any, copies: Iterator[Tensor]) -> Any:
    """Return `tree` with its tensors replaced in order, and with plain containers."""
    if isinstance(tree, Tensor):
        return next(copies)
    if isinstance(tree, Mapping):
        return {name: _rebuild(value, copies) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [_rebuild(value, copies) for value in tree]
        return tuple(values) if isinstance(tree, tuple) else values
    return tree
