"""What a forward may move beside the trained parameters, and a module's mode: put back as they
were.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

Place = tuple[dict[str, Any], str]  # where a module keeps a tensor, and its name there


def buffer_places(module: nn.Module) -> list[Place]:
    """The buffers (running statistics, caches)."""
    return [(owner._buffers, name) for owner in module.modules() for name in owner._buffers]


def frozen_places(module: nn.Module) -> list[Place]:
    """The parameters that are not trained: most never move, a mean teacher's do."""
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
def kept(places: Sequence[Place]) -> Iterator[None]:
    """Whatever the body does there, each tensor is itself again afterwards, with its old values."""
    before = [
        (home, name, home[name], None if home[name] is None else home[name].clone())
        for home, name in places
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
    """In evaluation mode, after which mode and buffers are as before: a forward here must not move
    what trainings save.
    """
    was_training = module.training
    module.eval()
    try:
        with kept(buffer_places(module)):
            yield
    finally:
        module.train(was_training)
