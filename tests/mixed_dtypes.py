"""A model whose parameters FSDP2 gathers in several dtypes, and the same one unsharded."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import Blocks, seed_weights

WIDTH, HIDDEN = 32, 48
FLOAT32 = ("norm", "gate", "1.down")
"""Which parameters stay in float32, by parts of their names; the others are bfloat16."""

needs_overrides = pytest.mark.skipif(
    "param_dtype_override_fn" not in signature(MixedPrecisionPolicy).parameters,
    reason=f"MixedPrecisionPolicy of torch {torch.__version__} has no param_dtype_override_fn, which came with 2.15",
)


class Mixed(nn.Module):
    """Each layer is given x in the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x.to(self.norm.weight.dtype))
        up, gate = (layer(h.to(layer.weight.dtype)) for layer in (self.up, self.gate))
        return x + self.down((up.float().relu() * gate.float()).to(self.down.weight.dtype)).to(x.dtype)


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if any(part in name for part in FLOAT32) else torch.bfloat16


def plain() -> nn.Module:
    return seed_weights(Blocks(Mixed(), Mixed()), 2.0)


def overriding(model: nn.Module, dtype_of: Callable[[str], torch.dtype] = dtype_of, **options: Any) -> Any:
    """FSDP2's policy: bfloat16, but for what ``dtype_of`` names."""
    kept = {id(p) for name, p in model.named_parameters() if dtype_of(name) is torch.float32}
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        param_dtype_override_fn=lambda parameter: torch.float32 if id(parameter) in kept else None,
        cast_forward_inputs=False,
        **options,
    )


def sharded(recipe: str | None = None, *, all_gather: bool = True, **options: Any) -> nn.Module:
    """Each block's parameters are one group, of both dtypes."""
    model = plain()
    if recipe is not None:
        f8sub.convert_to_float8(model, recipe=recipe, float8_all_gather=all_gather)
    policy = overriding(model, **options)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def unsharded(recipe: str | None = None) -> nn.Module:
    """Parameters rounded by hand, and then converted."""
    model = plain()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.detach().to(dtype_of(name))
    return model if recipe is None else f8sub.convert_to_float8(model, recipe=recipe)


def products(model: nn.Module, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """y and dx."""
    rng = generator(seed)
    x = gaussian((16, WIDTH), rng).bfloat16().requires_grad_()
    y = model(x)
    y.backward(gaussian(tuple(y.shape), rng).to(y.dtype))
    return y.detach(), x.grad


def own_gradients(ranks: int, recipe: str | None = None) -> dict[str, list[torch.Tensor]]:
    """By parameter, what each rank has before they are reduced."""
    found: dict[str, list[torch.Tensor]] = {}
    for rank in range(ranks):
        model = unsharded(recipe)
        products(model, rank)
        for name, parameter in model.named_parameters():
            found.setdefault(name, []).append(parameter.grad)
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def names_of_others(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Which differ in dtype or any bit, but for the signs of zeros."""
    same = {n: found[n].dtype is right[n].dtype and torch.equal(found[n], right[n]) for n in right}
    assert found.keys() == right.keys()
    return [name for name in same if not same[name]]
