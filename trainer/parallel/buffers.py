"""Keep tensors and the mode of a module unchanged during a forward."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

Slot = tuple[dict[str, Any], str]  # the dict in which a module keeps a tensor, and its key


def buffer_slots(module: nn.Module) -> list[Slot]:
    """Return the slots of all buffers, such as running statistics and caches."""
    return [(owner._buffers, name) for owner in module.modules() for name in owner._buffers]


def frozen_slots(module: nn.Module) -> list[Slot]:
    """Return the slots of the parameters that are not trained.

    Most of these parameters never change. Those of a mean teacher change in each forward.
    """
    owned = [
        (owner._parameters, name, p)
        for owner in module.modules()
        for name, p in owner._parameters.items()
    ]
    return [
        (home, name)
        for home, name, parameter in owned
        if parameter is not None and not parameter.requires_grad
    ]


@contextlib.contextmanager
def kept(slots: Sequence[Slot]) -> Iterator[None]:
    """Put each tensor back after the body, with its old values."""
    before = [
        (home, name, home[name], None if home[name] is None else home[name].clone())
        for home, name in slots
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for home, name, tensor, values in before:
                home[name] = tensor
                if tensor is not None:
                    tensor.copy_(values)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode, then restore the mode and the buffers.

    A checkpoint saves the buffers, so an evaluation must not change them.
    """
    was_training = module.training
    module.eval()
    try:
        with kept(buffer_slots(module)):
            yield
    finally:
        module.train(was_training)
