"""A small GPT over bytes: 256 tokens, rotary positions, layer norm before each block.

Legend: B sequences, T bytes in a sequence, H heads, C width, D = C / H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

NUM_BYTES = 256
"""A byte is a token, so there is no tokenizer to train or ship."""

INIT_STD = 0.02
"""Standard deviation of fresh weights, from GPT-2."""


@dataclass(frozen=True)
class GPTShape:
    """What decides the shapes of a GPT's parameters.

    Attributes:
        width: C, numel of the vector that stands for one byte.
        layers: Number of attention and MLP pairs.
        heads: H; ``width / heads`` is even, because rotary positions turn pairs.
        context: The most bytes that the model sees at once.
    """

    width: int
    layers: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        """Check that heads divide the width."""
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} cannot be cut into {self.heads} heads of even width; "
                f"use a multiple of {2 * self.heads}"
            )


class Rotary(nn.Module):
    """Turns pairs of features by angles that grow with the position, so that products depend on distance only.

    Source: RoFormer, arXiv:2104.09864.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, head_width: int) -> None:
        super().__init__()
        speeds = 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(context), speeds)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turn ``x``, (B, H, T, D)."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Attention(nn.Module):
    """Each byte looks at itself and at those before it."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.rotary = Rotary(shape.context, shape.width // shape.heads)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, C) from (B, T, C)."""
        batch, length, width = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        mixed = F.scaled_dot_product_attention(
            self.rotary(query), self.rotary(key), value, is_causal=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention between bytes, then an MLP on each; both add to what comes in."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, C) from (B, T, C)."""
        x = x + self.attention(self.attention_norm(x))
        mlp: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + mlp


class GPT(nn.Module):
    """Predicts each next byte of a text."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.context = shape.context
        self.embedding = nn.Embedding(NUM_BYTES, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, NUM_BYTES, bias=False)
        self._init_weights(shape.layers)

    def _init_weights(self, layers: int) -> None:
        """Draw weights as GPT-2 does: what is added in each block is smaller the more blocks there are."""
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif param.dim() == 2:
                is_added = name.endswith(("attention.out.weight", "mlp_out.weight"))
                nn.init.normal_(param, std=INIT_STD / math.sqrt(2 * layers if is_added else 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of the next byte at each place.

        Args:
            inputs: (B, T) int64 in [0, 256), T at most ``context``.

        Returns:
            (B, T, 256) float32.
        """
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each byte, (B * T,) in nats, from (B, T, 256) logits and (B, T) bytes."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


@torch.no_grad()
def generate(model: GPT, prompt: bytes, *, num_bytes: int, seed: int, temperature: float) -> bytes:
    """Return ``prompt`` and ``num_bytes`` bytes drawn from the model, one after the other."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(num_bytes):
        inputs = torch.tensor([text[-model.context :]], device=device)
        odds = (model(inputs)[0, -1].float().cpu() / temperature).softmax(dim=-1)
        text.append(int(torch.multinomial(odds, 1, generator=generator)))
    return bytes(text)
