"""torch.compile under DDP and FSDP2: bitwise eager, no recompilation. What is saved: tests/linear/test_compile.py."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import f8sub
from tests.compiling import WIDTH, compile_blocks, differences, mlps, train
from tests.data_sets import gaussian, generator
from tests.models import BF16, precompute, shard
from tests.selection import long_but

POLICIES = {"fp32": None, "bf16": BF16}


def under(wrapper: str, recipe: str, policy: str, *, compiled: bool, all_gather: bool = True) -> nn.Module:
    model = f8sub.convert_to_float8(mlps(None), recipe=recipe, float8_all_gather=all_gather)
    if compiled:
        compile_blocks(model)
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    return shard(model, POLICIES[policy])


CASES = [(recipe, "fsdp", "bf16", True) for recipe in ("rowwise", "mxfp8", "nvfp4")]
CASES += [("tensorwise", "fsdp", "fp32", True), ("rowwise", "fsdp", "bf16", False)]
CASES += [("blockwise", "ddp", "fp32", True)]
on_each_case = pytest.mark.parametrize(
    ("recipe", "wrapper", "policy", "all_gather"), long_but(CASES[:1], CASES)
)


@on_each_case
def test_compiled_blocks_are_bitwise_eager(rank, world, recipe, wrapper, policy, all_gather):
    """And never recompile."""
    torch._dynamo.reset()
    eager = train(under(wrapper, recipe, policy, compiled=False, all_gather=all_gather), steps=4, rank=rank)
    torch._dynamo.utils.counters.clear()
    compiled = train(under(wrapper, recipe, policy, compiled=True, all_gather=all_gather), steps=4, rank=rank)
    assert differences(compiled, eager) == []
    assert eager.graphs == [0] * 4
    assert compiled.graphs[0] > 0
    assert compiled.graphs[2:] == [compiled.graphs[1]] * 2


def test_guards_make_no_operand_of_a_gathered_weight(rank, world):
    """They run in Python at each call, and each that reads of one would make it again."""
    model = under("fsdp", "tensorwise", "bf16", compiled=True)
    precompute(model)
    x = gaussian((4, WIDTH), generator(rank)).bfloat16()
    model(x).backward(gaussian((4, WIDTH), generator(rank + 2)).bfloat16())
    made: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(error_on_recompile=True):
        patch.setattr(f8sub.Float8Tensor, "rowwise", property(made.append))
        model(x)
    assert made == []
