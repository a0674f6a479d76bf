"""Experts on a GPU: what the grouped products there make of the same codes, without waiting for the host."""

import pytest
import torch

import f8sub
from f8sub.features.experts.products import GroupedPlan
from tests.data_sets import gaussian, generator

DEVICE = torch.device("cuda")
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "gridquant", "mxfp8"]
COUNTS = {"ragged": [37, 1, 0, 130, 16], "even": [64, 64], "all empty": [0, 0]}
TAIL = 7
"""Rows of no expert, which hold NaN."""


def made(recipe: str, backend: str, counts: list[int], no_waiting: bool = False) -> list[torch.Tensor]:
    """y, dx, dw; ``no_waiting``: an error where the host waits for the GPU."""
    rows = sum(counts) + TAIL
    x, dy = (gaussian((rows, k), generator(k)).bfloat16() for k in (160, 96))
    x[rows - TAIL :] = dy[rows - TAIL :] = torch.nan
    x, dy = x.to(DEVICE).requires_grad_(), dy.to(DEVICE)
    w = gaussian((len(counts), 96, 160), generator(2)).bfloat16().to(DEVICE).requires_grad_()
    ends = torch.tensor(counts, device=DEVICE).cumsum(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if no_waiting else "default")
    try:
        y = f8sub.grouped_linear(x, w, ends, recipe, backend=backend)
        y.backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not y[rows - TAIL :].any()
    assert not x.grad[rows - TAIL :].any()
    return [y.detach(), x.grad, w.grad]


def runs(recipe: str, backend: str) -> None:
    """Skip where a backend does not multiply a recipe here."""
    try:
        GroupedPlan.make(f8sub.get_recipe(recipe), DEVICE, backend)
    except f8sub.Float8ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("backend", ["auto", "triton", "scaled_grouped_mm", "dequantize"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_the_references_and_wait_for_nothing(recipe, backend, counts):
    """Up to bf16's rounding of dequantized values and the sums' order."""
    runs(recipe, backend)
    made(recipe, backend, counts)  # kernels are compiled
    found, expected = made(recipe, backend, counts, no_waiting=True), made(recipe, "reference", counts)
    for name, a, b in zip(("y", "dx", "dw"), found, expected, strict=True):
        assert (a.float() - b.float()).norm() <= 2e-2 * b.float().norm(), name


def test_an_empty_experts_gradient_is_zero():
    for recipe in RECIPES:
        assert not made(recipe, "auto", COUNTS["ragged"])[2][2].any()


def test_what_multiplies():
    """Torch's own product one scale a row; ours the rest, on Hopper."""
    capability = torch.cuda.get_device_capability()
    plan = GroupedPlan.make(f8sub.get_recipe("rowwise"), DEVICE)
    assert {plan.fprop, plan.dgrad, plan.wgrad} == {
        "scaled_grouped_mm" if capability[0] in (9, 10) else "dequantize"
    }
    for recipe in ("blockwise", "gridquant", "tensorwise"):
        plan = GroupedPlan.make(f8sub.get_recipe(recipe), DEVICE)
        if capability == (9, 0):
            assert {plan.fprop, plan.dgrad, plan.wgrad} == {"triton"}
        assert GroupedPlan.make(f8sub.get_recipe("mxfp8"), DEVICE).fprop == "dequantize"


def test_a_step_is_captured_in_a_graph():
    for recipe in ("rowwise", "blockwise", "tensorwise"):
        x = gaussian((64, 160), generator(0)).bfloat16().to(DEVICE).requires_grad_()
        w = gaussian((3, 96, 160), generator(2)).bfloat16().to(DEVICE).requires_grad_()
        ends = torch.tensor([20, 20, 60], dtype=torch.int32, device=DEVICE)

        def step(recipe=recipe, x=x, w=w, ends=ends) -> tuple[torch.Tensor, ...]:
            y = f8sub.grouped_linear(x, w, ends, recipe)
            return y.detach(), *torch.autograd.grad(y, (x, w), torch.ones_like(y))

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            ends.copy_(torch.tensor([5, 40, 41]))
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b)
