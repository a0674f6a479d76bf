"""What a grouped linear layer must compute: a Float8Linear for each expert, called with that expert's tokens."""

from typing import NamedTuple

import torch
from torch import nn

import f8sub


class Made(NamedTuple):
    """What a layer made in forward and backward."""

    y: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor


def each_expert(
    x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, counts: list[int], recipe: str, backend: str
) -> Made:
    """``w`` is (E, N, K); rows of x and dy past the last group get zeros."""
    made = Made(dy.new_zeros(dy.shape), torch.zeros_like(x), torch.zeros_like(w))
    start = 0
    for index, count in enumerate(counts):
        rows = slice(start, start + count)
        start += count
        layer = nn.Linear(w.shape[2], w.shape[1], bias=False, dtype=w.dtype)
        layer.weight.data.copy_(w[index])
        layer = f8sub.convert_to_float8(layer, recipe, skip_defaults=False, backend=backend)
        part = x[rows].detach().requires_grad_()
        y = layer(part)
        y.backward(dy[rows])
        made.y[rows], made.dx[rows] = y.detach(), part.grad
        if layer.weight.grad is not None:
            made.dw[index] = layer.weight.grad
    return made
