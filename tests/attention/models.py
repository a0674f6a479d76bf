"""Small models that call attention in the ways that f8sub finds."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, KV_HEADS = 32, 4, 2


class Attention(nn.Module):
    """Causal, with grouped heads."""

    def __init__(self, heads: int = HEADS, kv_heads: int = KV_HEADS, width: int = WIDTH, of_head: int = 16):
        super().__init__()
        self.of_head = of_head
        self.q = nn.Linear(width, heads * of_head, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * of_head, bias=False) for _ in range(2))
        self.o = nn.Linear(heads * of_head, width, bias=False)

    def forward(self, x: torch.Tensor, **options) -> torch.Tensor:
        options = {"is_causal": True, "enable_gqa": True} | options
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.of_head)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return self.o(F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + torch.tanh(self.mlp(x))


def blocks(count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, x: torch.Tensor, call=None) -> list[torch.Tensor]:
    """The loss, and the gradients of all parameters, of a cotangent that is no constant."""
    model.zero_grad()
    loss = ((model if call is None else call)(x) * torch.linspace(-1, 1, WIDTH)).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
