"""torch.compile where GEMMs read row-major operands alone, as on Hopper: what is copied transposed is our kernels'."""

import pytest
import torch

from f8sub.kernels.gemm import select
from tests.compiling import compile_blocks, decibels, differences, gained, mlps, train
from tests.selection import long_but


@pytest.fixture(autouse=True)
def row_major(monkeypatch):
    """Of the CPU's GEMMs, which read anything."""
    for module in select.GEMM.values():
        monkeypatch.setattr(module, "takes_any_layout", lambda device: False)
    select.Plan.make.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    select.Plan.make.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", long_but(["rowwise"], ["rowwise", "delayed", "blockwise"]))
def test_aot_eager_is_bitwise_eager(recipe):
    eager = train(mlps(recipe), steps=3)
    compiled = train(compile_blocks(mlps(recipe)), steps=3)
    assert compiled.graphs[0] > 0
    assert differences(compiled, eager) == []


def test_a_single_token():
    """Bitwise here alone: of one row a CPU's product depends on how the other operand lies in memory."""
    shapes = [(2, 1), (1, 1), (3, 1)]
    eager = train(gained("mxfp8"), shapes=shapes)
    compiled = train(compile_blocks(gained("mxfp8"), dynamic=True), shapes=shapes)
    assert differences(compiled, eager) == []


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_inductor_calls_them(recipe):
    eager = train(mlps(recipe), steps=1)
    compiled = train(compile_blocks(mlps(recipe), "inductor"), steps=1)
    assert decibels(eager.outputs[0], compiled.outputs[0]) >= 40
    for right, found in zip(eager.gradients, compiled.gradients, strict=True):
        assert decibels(right, found) >= 20
