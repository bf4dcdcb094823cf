"""What the processor of this machine can compute."""

import torch
from torch import nn


def has_bf16_lstm() -> bool:
    """Return whether torch has an LSTM in bf16 here; without AVX-512, it has none."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(3, 4)(torch.zeros(5, 2, 3))
    except RuntimeError:
        return False
    return True
