"""Models whose layers keep x in one way or another, which ways a recipe has, and what a graph holds of x."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8sub
from f8sub.formats import why_not_derivable
from tests.data_sets import gaussian, generator
from tests.models import Blocks, seed_weights, update

RECIPES = f8sub.recipe_names()
WAYS = ("float8", "high_precision", "recompute")
WIDTH, HEADS, TOKENS = 32, 2, 12
on_each_way = pytest.mark.parametrize("way", WAYS)


def is_derivable(recipe: str) -> bool:
    row, col = f8sub.get_recipe(recipe).formats("x")
    return col is None or why_not_derivable(row, col) is None


def is_exact(recipe: str, way: str) -> bool:
    """Whether a way has the numbers of float8: not where rows' codes are scaled by columns."""
    row, col = f8sub.get_recipe(recipe).formats("x")
    return way != "recompute" or col is None or row.tile.is_transpose_of(col.tile)


EXACT = [(recipe, way) for recipe in RECIPES for way in WAYS[1:] if is_exact(recipe, way)]
RE_ENCODED = [(r, "recompute") for r in RECIPES if is_derivable(r) and not is_exact(r, "recompute")]
on_each_exact_way = pytest.mark.parametrize(("recipe", "way"), EXACT, ids=["-".join(case) for case in EXACT])


class Block(nn.Module):
    """Attention whose result o reads as it is, then an MLP whose relu saves what down reads."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 48), nn.Linear(48, width)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        heads = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in heads)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o(self.attention(x))
        return x + self.down(torch.relu(self.up(x)))


def blocks(count: int = 1) -> nn.Module:
    return Blocks(*(Block() for _ in range(count)))


def model_of(recipe: Any, keep_x: Any, model: nn.Module | None = None) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*re-scales the codes", f8sub.Float8Warning)
        return f8sub.convert_to_float8(seed_weights(model or blocks()), recipe=recipe, keep_x=keep_x)


def tokens(seed: int = 1) -> torch.Tensor:
    """Of one size but for a few elements."""
    x = gaussian((2, TOKENS, WIDTH), generator(seed))
    x[:, 3, 5] *= 20.0
    return x.requires_grad_()


def trained(model: nn.Module, run: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
    """y, dx and all gradients of three steps, the last ones with scales of the steps before."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        x = tokens(step)
        y = (run or model)(x)
        y.backward(gaussian(tuple(y.shape), generator(10 + step)).to(y.dtype))
        found += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        update(model, optimizer)
    assert all(tensor.isfinite().all() for tensor in found)
    return found


def nodes_of(y: torch.Tensor) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """The graph behind y, and what each node saves: without hooks, under which "auto" saves float8."""
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        saved = [*saved, *getattr(node, "saved_tensors", ())]
        yield node, [tensor for tensor in saved if isinstance(tensor, torch.Tensor)]
