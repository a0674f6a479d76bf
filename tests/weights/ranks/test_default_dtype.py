"""Nothing depends on ``torch.set_default_dtype``: what is made under another one is bitwise what float32's makes."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import f8sub
from tests.data_sets import generator

pytestmark = pytest.mark.own_ranks
STEPS = 2


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float32)


def trained(recipe: str) -> list[torch.Tensor]:
    """Outputs and weights of a few steps; the tensors that a user makes are float32 by name."""
    layers = (nn.Linear(64, 96, dtype=torch.float32), nn.Linear(96, 64, bias=False, dtype=torch.float32))
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=100 + seed) / 8)
    f8sub.convert_to_float8(model, recipe=recipe)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    f8sub.skip_step_if_nonfinite(optimizer)
    f8sub.precompute_scales(model)
    found = []
    for step in range(STEPS):
        y = model(noise(16, 64, seed=step))
        y.backward(noise(16, 64, seed=10 + step))
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
        found.append(y.detach())
    return found + [p.to_local().detach() for p in model.parameters()]


def quantized(recipe: str) -> list[torch.Tensor]:
    tensor = f8sub.quantize(noise(32, 64, seed=1), recipe, operand="x")
    operands = [operand for operand in (tensor.rowwise, tensor.columnwise) if operand is not None]
    return [*(t.clone() for operand in operands for t in operand.tensors), tensor.dequantize()]


def as_bytes(tensors: list[torch.Tensor]) -> list[bytes]:
    return [bytes(t.contiguous().view(torch.uint8).flatten().tolist()) for t in tensors]


def everything(rank: int, world: int, dtype: torch.dtype) -> dict[str, list[bytes]]:
    torch.set_default_dtype(dtype)
    kinds = {"quantize": quantized, "training": trained}
    return {f"{r}, {kind}": as_bytes(made(r)) for r in f8sub.recipe_names() for kind, made in kinds.items()}


def test_another_default_changes_no_bit(ranks):
    """In processes of their own: what was made and kept under one default must not hide in another's run.

    That all factories name their dtype, tests/contract/test_house.py looks at.
    """
    for found, expected in zip(
        *(ranks(2, everything, dtype) for dtype in (torch.bfloat16, torch.float32)), strict=True
    ):
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []
