"""A transformer of GPT-2's shape, which predicts the next byte.

Radford, Wu, Child, Luan, Amodei and Sutskever, "Language Models are Unsupervised Multitask
Learners" (2019).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Shape suffixes: B windows of a batch, T bytes of a window, E width, F width of a block's inner
# layer, H heads, D width of a head.

BYTES = 256
_STD = 0.02


class Gpt(nn.Module):
    """A model of bytes (B, T) to logits (B, T, 256) of the byte that follows each of them.

    T is at most `context`. The output layer has the weights of the byte embeddings.
    """

    def __init__(self, layers: int, heads: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        # Each block adds two outputs to the sum of all blocks, whose variance would grow.
        for block in self.blocks:
            assert isinstance(block, _Block)
            for module in (block.attention.output, block.shrink):
                nn.init.normal_(module.weight, std=_STD / (2 * layers) ** 0.5)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        positions_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        hidden_BTE = self.dropout(self.embedding(bytes_BT) + self.positions(positions_T))
        for block in self.blocks:
            hidden_BTE = block(hidden_BTE)
        return F.linear(self.norm(hidden_BTE), self.embedding.weight)


class _Block(nn.Module):
    """Attention and two linear layers, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.norm = nn.LayerNorm(width)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BTE: Tensor) -> Tensor:
        hidden_BTE = hidden_BTE + self.dropout(self.attention(self.attention_norm(hidden_BTE)))
        grown_BTF = F.gelu(self.grow(self.norm(hidden_BTE)), approximate="tanh")
        added_BTE: Tensor = self.dropout(self.shrink(grown_BTF))
        return hidden_BTE + added_BTE


class _Attention(nn.Module):
    """Attention with several heads, in which a byte sees only itself and the bytes before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.input = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden_BTE: Tensor) -> Tensor:
        heads_3BHTD = (
            self.input(hidden_BTE).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        queries_BHTD, keys_BHTD, values_BHTD = heads_3BHTD.unbind()
        # In its deterministic mode, torch leaves out the kernels that are not deterministic.
        mixed_BHTD = F.scaled_dot_product_attention(
            queries_BHTD,
            keys_BHTD,
            values_BHTD,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        mixed_BTE: Tensor = self.output(mixed_BHTD.transpose(1, 2).flatten(2))
        return mixed_BTE
