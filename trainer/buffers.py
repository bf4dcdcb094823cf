"""A module's mode and buffers (running statistics, caches), put back as they were."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Whatever the body does to the buffers of `module`, each is itself again afterwards, with its old values."""
    kept = [
        (owner, name, buffer, None if buffer is None else buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, values in kept:
                owner._buffers[name] = buffer
                if buffer is not None and values is not None:
                    buffer.copy_(values)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In evaluation mode, after which mode and buffers are as before: a forward here must not move what trainings save."""
    was_training = module.training
    module.eval()
    try:
        with kept_buffers(module):
            yield
    finally:
        module.train(was_training)
