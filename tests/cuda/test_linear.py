"""A converted layer on a GPU: its three products, eager and compiled, wherever it was converted; no host syncs."""

import pytest
import torch
from torch import nn

import f8sub
from tests import oracle
from tests.budgets import excess
from tests.contract.test_linear_numerics import converted
from tests.data_sets import make, on_each_dtype
from tests.kernels.products import promoted
from tests.layers import on_each_recipe
from tests.models import update

SHAPES = {"aligned": (64, 96, 128), "odd-batch": (13, 96, 144), "odd": (13, 80, 48), "one-row": (1, 256, 144)}
GEMMS = {"y": "fprop", "dx": "dgrad", "dw": "wgrad"}
on_each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


def tensors(shape, dtype) -> tuple[torch.Tensor, ...]:
    rows, depth, cols = shape
    shapes = ((rows, depth), (cols, depth), (rows, cols), (1, cols))
    x, w, dy, bias = (make("gaussian", s, seed, dtype) for seed, s in enumerate(shapes))
    return x, w, dy, bias[0]


def layer_of(recipe: str, w: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    return converted(recipe, w.cuda(), bias if bias is None else bias.cuda())


def step(layer: nn.Module, weight, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.cuda().requires_grad_()
    weight.grad = None
    y = layer(x)
    y.backward(dy.cuda())
    return {"y": y.detach(), "dx": x.grad, "dw": weight.grad}


def assert_within_budget(layer, results, right) -> None:
    plan, worst = layer._f8sub.plan, {}
    for name, gemm in GEMMS.items():
        depth = right[name].a.shape[1]
        accumulated = promoted(getattr(plan, gemm), getattr(plan.recipe, gemm).fast_accum, depth)
        worst[name] = excess(results[name], right[name], accumulated)
    assert all(ratio <= 1 for ratio in worst.values()), f"errors in units of their budgets: {worst}"


@on_each_dtype
@on_each_shape
@on_each_recipe
def test_the_three_products(recipe, shape, dtype):
    x, w, dy, bias = tensors(shape, dtype)
    layer = layer_of(recipe, w, bias)
    results = step(layer, layer.weight, x, dy)
    assert {tensor.dtype for tensor in results.values()} == {dtype}
    assert_within_budget(layer, results, oracle.linear(recipe, x, w, dy, bias))


@pytest.mark.parametrize(
    ("shape", "biased"), [("aligned", False), ("odd-batch", True), ("odd", False), ("one-row", True)]
)
@on_each_recipe
def test_compiled_by_inductor(recipe, shape, biased):
    """The same codes as in eager code, so the same products."""
    x, w, dy, bias = tensors(SHAPES[shape], torch.bfloat16)
    bias = bias if biased else None
    layer = layer_of(recipe, w, bias)
    eager = step(layer, layer.weight, x, dy)
    torch._dynamo.reset()
    compiled = step(torch.compile(layer, fullgraph=True), layer.weight, x, dy)
    assert_within_budget(layer, compiled, oracle.linear(recipe, x, w, dy, bias))
    for name in ("dx", "dw"):
        assert torch.equal(compiled[name], eager[name]), name


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@on_each_recipe
def test_a_batch_of_no_rows(recipe, compiled):
    x, w, dy, _ = tensors((0, 96, 128), torch.bfloat16)
    layer = layer_of(recipe, w)
    torch._dynamo.reset()
    results = step(torch.compile(layer, fullgraph=True) if compiled else layer, layer.weight, x, dy)
    assert (results["y"].shape, results["dx"].shape) == (dy.shape, x.shape)
    assert torch.equal(results["dw"], torch.zeros_like(results["dw"]))


@pytest.mark.parametrize("how", ["cuda", "data", "meta"])
@on_each_recipe
def test_converted_before_it_was_moved(recipe, how):
    """By ``.cuda()``, by ``fully_shard``'s way, or off the meta device: the backends are those of the device."""
    x, w, dy, _ = tensors(SHAPES["odd-batch"], torch.bfloat16)
    with torch.device("meta" if how == "meta" else "cpu"):
        linear = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
    model = f8sub.convert_to_float8(nn.Sequential(linear), recipe=recipe)
    if how == "meta":
        model.to_empty(device="cuda")
    elif how == "cuda":
        model.cuda()
    else:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.cuda()
    with torch.no_grad():
        model[0].weight.copy_(w)
    results = step(model[0], model[0].weight, x, dy)
    right = layer_of(recipe, w)
    assert model[0]._f8sub.plan.fprop == right._f8sub.plan.fprop
    assert_within_budget(right, results, oracle.linear(recipe, x, w, dy))


@on_each_recipe
def test_moved_back_to_the_cpu(recipe):
    x, w, _, _ = tensors(SHAPES["odd-batch"], torch.bfloat16)
    expected = layer_of(recipe, w).cpu()(x)
    plain = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
    plain.weight = nn.Parameter(w)
    assert torch.equal(f8sub.convert_to_float8(nn.Sequential(plain), recipe=recipe)(x), expected)


class NoSync:
    """Any wait of the host for the device raises."""

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@on_each_recipe
def test_the_host_never_waits(recipe, compiled, checkpointed):
    """Forward, backward, AdamW and precompute_scales, after steps in which things are allocated and compiled.

    Delayed scaling's layers are compiled again once the host has been told that their scales are made, by the second
    roll at the latest where the GPU has done what the first one asked for.
    """
    from torch.utils.checkpoint import checkpoint

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 96)).cuda()
    f8sub.convert_to_float8(model, recipe=recipe)
    called = torch.compile(model, fullgraph=True) if compiled else model
    run = (lambda x: checkpoint(called, x, use_reentrant=False)) if checkpointed else called
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(48, 96, device="cuda")

    def train() -> None:
        run(x).square().mean().backward()
        update(model, optimizer)

    for _ in range(3):
        train()
        torch.cuda.synchronize()
    with NoSync():
        train()
        train()
