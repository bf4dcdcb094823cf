"""Keep RNN modules out of bf16 on NVIDIA GPUs, where autocast would compute them in fp16.

torch's wrapper of cuDNN's RNNs casts to fp16 whatever type autocast has
(aten/src/ATen/cudnn/AutocastRNN.cpp). Without the scaler of `--precision fp16`, small gradients
would be lost. Cells such as `nn.LSTMCell` have wrappers that use the type of autocast.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


class WithoutAutocast(nn.RNNBase):
    """An RNN that computes in the type of its weights."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        weight = self._flat_weights[0]
        assert weight is not None
        with torch.autocast(weight.device.type, enabled=False):
            return super().forward(
                *_cast(inputs, weight.dtype),
                **{name: _cast(value, weight.dtype) for name, value in named.items()},
            )


def keep_rnns_out_of_autocast(
    model: nn.Module, device_type: str, autocast_dtype: torch.dtype | None
) -> None:
    """Make the RNNs of `model` compute in the type of their weights, if autocast would use fp16."""
    if device_type != "cuda" or autocast_dtype != torch.bfloat16:
        return
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and not isinstance(module, WithoutAutocast):
            # Replace the class and not the method, because DataParallel copies the attributes of a
            # module, and a method would stay bound to the original. fully_shard does the same.
            module.__class__ = _without_autocast(type(module))  # type: ignore[arg-type]


@functools.cache
def _without_autocast(kind: type[nn.RNNBase]) -> type[WithoutAutocast]:
    """Return the class `kind` without autocast, under the same name."""
    return type(kind.__name__, (WithoutAutocast, kind), {"__module__": kind.__module__})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with all tensors of floats in `dtype`."""
    if isinstance(value, PackedSequence):
        return value.to(dtype=dtype)
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(part, dtype) for part in value)
    return value
