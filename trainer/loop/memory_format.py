"""Choose the memory format of a model's 2D convolutions, which a run keeps because it changes bits.

The reasons are in docs/decisions/0013-speed.md.
"""

import torch
from torch import nn

from trainbox.options.config import CHANNELS_LAST, CONTIGUOUS, Config
from trainer.parallel.strategy import Strategy

# The types of devices and the precisions for which 2D convolutions are faster with weights in the
# memory format channels_last.
_FASTER = {("cpu", "bf16"), ("cuda", "bf16"), ("cuda", "fp16")}


class NeedsContiguous(RuntimeError):
    """The first steps failed with the channels last, which the task may not support.

    The cause is the error of this rank, if it has one.
    """


def memory_format(config: Config, strategy: Strategy, model: nn.Module) -> str:
    """Return the run's memory format, or choose it.

    The choice depends only on the model, the device and the precision, so each start of a command
    has the same bits. Convolutions in bf16, and on a GPU in fp16, are faster with the channels
    last. If the first steps then fail, for example at a `view`, the start begins again with
    contiguous weights. If the task itself caused the error, it fails once more and is reported.
    """
    if config.memory_format is not None:
        return config.memory_format
    is_faster = (strategy.world.device.type, config.precision) in _FASTER
    has_pictures = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if is_faster and has_pictures and strategy.rules.allows_channels_last:
        return CHANNELS_LAST
    return CONTIGUOUS


def put_channels_last(model: nn.Module) -> None:
    """Store the weights of convolutions of pictures with the channels last."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
