"""grouped_linear by our own products, interpreted on the CPU, against the reference's."""

import contextlib

import pytest
import torch

import f8sub
from f8sub.kernels.gemm.select import Plan
from tests.data_sets import gaussian, generator
from tests.kernels.interpreted import interpreted
from tests.selection import long_but

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "gridquant"]
COUNTS = {"uneven": [37, 1, 0, 130, 16], "all empty": [0, 0]}
TAIL = 7
"""Rows of no expert, which hold NaN."""


def on_the_cpu() -> contextlib.ExitStack:
    """Have the products run where there is no GPU, in tiles that are interpreted."""
    from unittest.mock import patch

    from f8sub.kernels.gemm.tuning import GroupedConfig
    from f8sub.kernels.grouped import gemm

    stack = contextlib.ExitStack()
    for target, changes in (
        (gemm, {"why_not_device": lambda device: None, "multiprocessors": lambda device: 3}),
        (gemm, {"default_grouped_config": lambda *how: GroupedConfig(64, 64, 3)}),
        (torch.cuda, {"device": lambda device: contextlib.nullcontext()}),
    ):
        stack.enter_context(patch.multiple(target, **changes))
    return stack


def made(recipe: str, backend: str, counts: list[int]) -> list[torch.Tensor]:
    """y, dx, dw."""
    rows = sum(counts) + TAIL
    x, dy = (gaussian((rows, k), generator(k)).bfloat16() for k in (160, 96))
    x[rows - TAIL :] = dy[rows - TAIL :] = torch.nan
    x.requires_grad_()
    w = gaussian((len(counts), 96, 160), generator(2)).bfloat16().requires_grad_()
    y = f8sub.grouped_linear(x, w, torch.tensor(counts).cumsum(0), recipe, backend=backend)
    y.backward(dy)
    return [y.detach(), x.grad, w.grad]


@pytest.mark.parametrize(
    ("recipe", "kind"),
    long_but(
        [("rowwise", "all empty")],
        [("rowwise", "all empty"), *((recipe, "uneven") for recipe in RECIPES)],
    ),
)
@interpreted
def test_products_are_the_references(recipe, kind):
    counts = COUNTS[kind]
    with on_the_cpu():
        plan = Plan.make(f8sub.get_recipe(recipe), torch.device("cpu"), "triton", grouped=True)
        assert {plan.fprop, plan.dgrad, plan.wgrad} - {None} == {"triton"}
        found = made(recipe, "triton", counts)
    for name, a, b in zip(("y", "dx", "dw"), found, made(recipe, "reference", counts), strict=True):
        # Sums in another order, rounded to bf16.
        assert (a.float() - b.float()).abs().max() <= 2**-8 * b.float().abs().max(), name
        if name != "dw":
            assert not a[len(a) - TAIL :].any(), name
