"""Problem: the shapes and options of one call of attention, as its kernels are built for them."""

from typing import NamedTuple

import torch

from f8sub.formats import ALL, Float8Format, Tile

PER_TENSOR = Tile(ALL, ALL)
E4M3, E5M2 = (Float8Format(dtype, PER_TENSOR) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
"""Of q, k, v, o and of what backward makes; and of dO and dP where their range counts more than their precision."""

HIGH_PRECISION = "bf16"
GRADIENT_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
BACKWARDS = (*GRADIENT_FORMATS, HIGH_PRECISION)
"""What backward multiplies: dO and dP in a float8 format, or everything in bf16."""


class Problem(NamedTuple):
    """One call of attention: q (batch, heads, rows, width), k and v (batch, kv_heads, cols, width).

    Attributes:
        causal: row i sees columns 0 to i, as ``is_causal`` of torch's ``scaled_dot_product_attention``.
        scale: of q @ k.t().
        by_heads: of q, k and v, whether memory is in the order (batch, heads, rows, width), that of the dimensions;
            else it is (batch, rows, heads, width), as linear layers leave it.
    """

    batch: int
    heads: int
    kv_heads: int
    rows: int
    cols: int
    width: int
    causal: bool
    scale: float
    by_heads: tuple[bool, bool, bool]

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> "Problem":
        """Return the problem of packed q, k and v, see ``packed``."""
        batch, heads, rows, width = q.shape
        # A tensor of one row or one head lies both ways.
        by_heads = q.is_contiguous(), k.is_contiguous(), v.is_contiguous()
        return cls(batch, heads, k.shape[1], rows, k.shape[2], width, causal, scale, by_heads)

    @property
    def group(self) -> int:
        """Heads of q for each head of k and v."""
        return self.heads // self.kv_heads


def packed(x: torch.Tensor) -> torch.Tensor:
    """Return x (batch, heads, rows, width) without gaps in memory, in the order of its dimensions or by rows first."""
    return x if x.is_contiguous() else x.transpose(1, 2).contiguous().transpose(1, 2)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """Return a view of a packed tensor as its memory lies: (batch * heads * rows, width)."""
    return (x if x.is_contiguous() else x.transpose(1, 2)).view(-1, x.shape[-1])


def like(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a view of what ``as_matrix`` of x became, in the shape and order of x."""
    if x.is_contiguous():
        return matrix.view(x.shape)
    return matrix.view(x.transpose(1, 2).shape).transpose(1, 2)
