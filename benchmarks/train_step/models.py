"""The models: GPT-2's architecture in plain torch, without dropout, so that variants can be compared bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own custom


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT, and the batch that it is trained on."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int
    sequence: int = 64
    batch: int = 1


MODELS = {
    "gpt2": Shape(layers=12, width=768, heads=12, vocabulary=50257, positions=1024),
    "10m": Shape(layers=6, width=320, heads=5, vocabulary=8192, positions=256),
}
"""GPT-2 small (124 M parameters) and a GPT of 10 M."""


class Attention(nn.Module):
    """Causal self-attention; one matrix makes queries, keys and values, as in GPT-2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(nn.Module):
    """Attention and two-layer network, each on a residual branch behind a layer norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class GPT(nn.Module):
    """Returns the loss, so that whatever wraps it has a scalar output. Embedding and head are tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = nn.Embedding(shape.positions, shape.width)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.wte.weight
        self.apply(_init)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss of predicting each of ``tokens`` (batch, sequence + 1) from those before it."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.wte(inputs) + self.wpe(torch.arange(inputs.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _init(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build(name: str, *, dtype: torch.dtype) -> GPT:
    """Make a model; the same on every rank."""
    torch.manual_seed(0)
    return GPT(MODELS[name]).to(dtype)


class Batches:
    """Random tokens, the same in every variant, others on each rank."""

    def __init__(self, name: str, *, rank: int) -> None:
        self._shape = MODELS[name]
        self._generator = torch.Generator().manual_seed(1000 + rank)

    def take(self) -> Tensor:
        """The next (batch, sequence + 1) tokens."""
        size = (self._shape.batch, self._shape.sequence + 1)
        return torch.randint(self._shape.vocabulary, size, generator=self._generator)
