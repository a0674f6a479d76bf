"""Partial sums: where the reference adds them up, and what a tensor core's narrow accumulator makes of them."""

import dataclasses

import torch
from torch import nn

import f8sub
from f8sub.kernels import reference
from tests import oracle
from tests.budgets import product_budget
from tests.data_sets import gaussian, generator

DEPTH, STEP, BITS = 4096, 32, 14
"""K; the elements of K that one tensor core instruction multiplies; the bits its accumulator keeps of a sum."""


def truncated(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & -(1 << (24 - BITS))).view(torch.float32)


def add_as_hopper_does(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``reference.add_partial_sum`` whose sum loses all but 14 bits after every step."""
    partial = torch.zeros_like(total)
    for left, right in zip(a.split(STEP, 1), b.split(STEP, 1), strict=True):
        partial = truncated(partial + left @ right.t())
    total += partial


def narrow_excess(recipe: f8sub.Recipe) -> tuple[float, float]:
    """Error of y over K = 4096, in units of the budget below; and the largest relative one."""
    x, w = gaussian((16, DEPTH), generator(1)).abs(), gaussian((16, DEPTH), generator(2)).abs()
    layer = nn.Linear(DEPTH, 16, bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
        y = f8sub.convert_to_float8(nn.Sequential(layer), recipe=recipe)(x)
    product = oracle.Product(oracle.values("blockwise", "x", x)[0], oracle.values("blockwise", "w", w)[0])
    # Each of the 128 / 32 steps of a partial sum may lose its last bit.
    lost = reference.PROMOTION // STEP * 2.0 ** -(BITS - 1) * product.matmul
    error = abs(y.double().numpy() - product.value)
    return (error / (lost + product_budget(product, y.dtype))).max(), (error / product.value).max()


def test_promotion_keeps_the_budget_where_one_sum_over_all_of_k_does_not(monkeypatch):
    """Of like signs, K = 4096, a sum of 14 bits loses 0.34 %, 4.7 budgets; a promoted one 0.013 %, 0.18 budgets.

    Source of the 14 bits: DeepSeek-V3, arXiv 2412.19437, 3.3.2. In float32 both are right to a millionth.
    """
    blockwise = f8sub.get_recipe("blockwise")
    one_sum = dataclasses.replace(blockwise, fprop=dataclasses.replace(blockwise.fprop, fast_accum=True))
    in_float32 = [narrow_excess(recipe)[1] for recipe in (blockwise, one_sum)]
    assert max(in_float32) < 1e-6
    monkeypatch.setattr(reference, "add_partial_sum", add_as_hopper_does)
    (promoted, promoted_loss), (single, single_loss) = narrow_excess(blockwise), narrow_excess(one_sum)
    assert promoted <= 1 < 4 < single
    assert promoted_loss < 4e-4
    assert single_loss > 2e-3


def test_which_gemms_are_promoted():
    """Scales of parts of K are applied to partial sums: only a scale for all of K leaves the choice."""
    for name in f8sub.recipe_names():
        recipe = f8sub.get_recipe(name)
        for spec in (recipe.fprop, recipe.dgrad, recipe.wgrad):
            assert spec.a is None or not spec.fast_accum or spec.a.tile.cols == spec.b.tile.cols == f8sub.ALL
