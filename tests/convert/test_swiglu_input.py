"""SwiGLU's input in float8: the numbers, what compiled code saves and multiplies, and which layers are found."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.convert.swiglu_input import FORMAT, exponents_of
from f8sub.kernels.scales import scales_from_amax
from tests.data_sets import gaussian, generator, row_outliers
from tests.models import FeedForward
from tests.selection import long_but

WIDTH, HIDDEN, TOKENS = 64, 256, 32
aten = torch.ops.aten


def made(recipe: str | None = "tensorwise", hidden: int = HIDDEN) -> FeedForward:
    torch.manual_seed(0)
    model = FeedForward(WIDTH, hidden).bfloat16()
    return model if recipe is None else f8sub.convert_to_float8(model, recipe, skip_defaults=False)


def rounded(y: torch.Tensor, block: int) -> torch.Tensor:
    """The oracle: e4m3 of each block in float64, with the largest power of two that takes its amax to 448 at most."""
    blocks = y.double().reshape(-1, block)
    amax = blocks.abs().amax(1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, torch.exp2(torch.floor(torch.log2(448 / amax))))
    codes = (blocks * scale).float().to(torch.float8_e4m3fn)
    return (codes.double() / scale).to(y.dtype).view(y.shape)


EAGER = [(256, 128, False), (192, 64, False), (80, 16, False)]


@pytest.mark.parametrize("data", [gaussian, row_outliers])
@pytest.mark.parametrize(
    ("hidden", "block", "is_compiled"),
    long_but(EAGER, [*EAGER, (256, 128, True)]),
)
def test_gate_and_up_are_rounded_by_blocks_and_gradients_pass(data, hidden, block, is_compiled):
    model = made("rowwise", hidden)
    x = data((TOKENS, WIDTH), generator(1)).bfloat16()
    plain = model.gate_proj(x)
    assert f8sub.keep_swiglu_input_in_float8(model) == ["gate_proj", "up_proj"]
    layer = torch.compile(model.gate_proj, fullgraph=True) if is_compiled else model.gate_proj
    y = layer(x)
    assert torch.equal(y, rounded(plain, block))
    assert not torch.equal(y, plain)
    dy = gaussian(tuple(y.shape), generator(2)).bfloat16()
    y.backward(dy)
    other = made("rowwise", hidden)
    other.gate_proj(x).backward(dy)
    assert torch.equal(model.gate_proj.weight.grad, other.gate_proj.weight.grad)


def test_exponents_are_those_of_the_rule():
    bits = torch.cat([torch.arange(0, 2**31 - 2**23, 65537, dtype=torch.int64), 448 * 2 ** torch.arange(24)])
    near = [448 * 2.0**e * (1 + d) for e in range(-130, 119) for d in (-(2.0**-23), 0, 2.0**-23)]
    amax = torch.cat([bits.int().view(torch.float32), torch.tensor(near)])
    amax = amax[amax > 0]
    expected = scales_from_amax(amax, FORMAT).scale_inv.view(torch.int32) >> 23
    assert torch.equal(exponents_of(amax), expected)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_is_not_finite_becomes_nan_alone(is_compiled):
    model = nn.Sequential(nn.Identity())
    model.gate_up_proj = nn.Linear(2, 256, bias=False)
    f8sub.keep_swiglu_input_in_float8(model)
    weight = gaussian((256, 2), generator(3))
    weight[5], weight[130] = torch.inf, torch.nan
    model.gate_up_proj.weight.data = weight
    layer = torch.compile(model.gate_up_proj) if is_compiled else model.gate_up_proj
    y = layer(torch.ones(1, 2))
    expected = rounded(torch.where(weight.isfinite(), weight, 0.0).sum(1)[None], 128)
    expected[0, 5] = expected[0, 130] = torch.nan
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(), expected.nan_to_num())


def graphs(model: nn.Module, run: Any) -> tuple[list[torch.Tensor], int]:
    """What a compiled forward hands to backward, and how many products backward has."""
    torch._dynamo.reset()
    found: dict[str, Any] = {}

    def forward(graph: torch.fx.GraphModule, example: Any) -> Any:
        (outputs,) = next(node.args for node in graph.graph.nodes if node.op == "output")
        made_here = [
            node for node in outputs[1:] if isinstance(node, torch.fx.Node) and node.op != "placeholder"
        ]
        found["saved"] = [node.meta["val"] for node in made_here]
        return graph

    def backward(graph: torch.fx.GraphModule, example: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        found["products"] = sum("_scaled_mm" in name or "gemm_nt" in name for name in names)
        return graph

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),  # Inductor's, which makes other nodes of what detaches
    )
    x = gaussian((TOKENS, WIDTH), generator(1)).bfloat16().requires_grad_()
    y = torch.compile(functools.partial(run, model), backend=backend, fullgraph=True)(x)
    y.backward(gaussian(tuple(y.shape), generator(2)).bfloat16())
    return found["saved"], found["products"]


def wide(saved: list[torch.Tensor]) -> Counter[torch.dtype]:
    """Dtypes of what is saved of the hidden width, which blocks of 128 cut."""
    return Counter(t.dtype for t in saved if t.numel() == TOKENS * HIDDEN)


BF16_POLICY, GEMMS_POLICY = map(f8sub.checkpoint_policy, ("bf16", "gemms"))


def selectively(model: nn.Module, x: torch.Tensor, policy: Any) -> Any:
    return checkpoint(model, x, use_reentrant=False, context_fn=policy)


RUNS = {
    "saved": (lambda model, x: model(x), 2),
    "policy-bf16": (functools.partial(selectively, policy=BF16_POLICY), 1),
    "policy-gemms": (functools.partial(selectively, policy=GEMMS_POLICY), 2),
    "full": (lambda model, x: checkpoint(model, x, use_reentrant=False), 0),
}


@pytest.mark.parametrize("name", long_but(["policy-bf16"], RUNS))
def test_compiled_code_saves_codes_and_multiplies_nothing_again(name):
    run, halves = RUNS[name]
    plain, products = graphs(made(), run)
    model = made()
    f8sub.keep_swiglu_input_in_float8(model)
    saved, rounded_products = graphs(model, run)
    before, after = wide(plain), wide(saved)
    assert (before[torch.bfloat16], after[torch.bfloat16]) == (halves, 0)
    assert rounded_products == (6 if halves else products)
    if isinstance(run, functools.partial):  # a policy, by which nothing else of that width is saved
        assert after == {torch.float8_e4m3fn: 2}
        exponents = [t for t in saved if t.dtype == torch.uint8]
        assert sum(t.numel() for t in exponents) == 2 * TOKENS * HIDDEN // 128


@pytest.mark.parametrize("is_compiled", long_but([False], [False, True]))
def test_checkpointing_changes_no_bit(is_compiled):
    found = []
    for run in (lambda model, x: model(x), functools.partial(selectively, policy=BF16_POLICY)):
        torch._dynamo.reset()
        model = made()
        f8sub.keep_swiglu_input_in_float8(model)
        x = gaussian((TOKENS, WIDTH), generator(1)).bfloat16().requires_grad_()
        call = functools.partial(run, model)
        y = (torch.compile(call, backend="aot_eager") if is_compiled else call)(x)
        y.backward(gaussian(tuple(y.shape), generator(2)).bfloat16())
        found.append((y, x.grad, *(p.grad for p in model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_equal_blocks_compile_once():
    torch._dynamo.reset()
    blocks = nn.Sequential(*(made() for _ in range(3)))
    f8sub.keep_swiglu_input_in_float8(blocks)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for block in blocks:
            x = torch.compile(block, backend="eager")(x).detach()


def test_layers_by_name_by_pattern_and_back():
    model = nn.ModuleDict({"mlp": made(None), "other": nn.Linear(64, 64), "router": nn.Module()})
    model.router.gate = nn.Linear(64, 4)
    f8sub.convert_to_float8(model, skip_defaults=False, skip=["router"])
    assert f8sub.keep_swiglu_input_in_float8(model) == ["mlp.gate_proj", "mlp.up_proj"]
    with pytest.warns(f8sub.Float8Warning, match=r"layers=\['fc1'\] of keep_swiglu_input_in_float8 match no"):
        assert f8sub.keep_swiglu_input_in_float8(model, layers=["other", "fc1"]) == ["other"]
    assert sum(len(each._forward_hooks) for each in model.mlp.children()) == 2
    f8sub.convert_from_float8(model)
    assert not any(each._forward_hooks for each in model.modules())


def test_a_model_without_swiglu_is_refused():
    with pytest.raises(f8sub.Float8ConfigError, match=r"called gate_proj and up_proj, .* has 0: give"):
        f8sub.keep_swiglu_input_in_float8(nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises(f8sub.Float8ConfigError, match=r"no linear layer is called \['fc1'\]"):
        f8sub.keep_swiglu_input_in_float8(nn.Sequential(nn.Linear(64, 64)), layers=["fc1"])


@pytest.mark.parametrize(("hidden", "of_scales"), [(256, 2), (80, 5)])
def test_the_report_names_what_is_kept_and_its_bytes(hidden, of_scales):
    model = nn.ModuleDict({"layers": nn.ModuleList(made(hidden=hidden) for _ in range(3))})
    assert "SwiGLU" not in str(f8sub.conversion_report(model))
    f8sub.keep_swiglu_input_in_float8(model["layers"][1])
    f8sub.keep_swiglu_input_in_float8(model["layers"][2])
    report = f8sub.conversion_report(model)
    assert [(each.fqn, each.features, each.bytes) for each in report.swiglu] == [
        (f"layers.{i}.{name}", hidden, hidden + of_scales)
        for i in (1, 2)
        for name in ("gate_proj", "up_proj")
    ]
    assert "SwiGLU's input of 2 modules kept in float8" in report.summary
    page = " ".join(str(report).split())
    assert "the results of layers.*.gate_proj, layers.*.up_proj. Of 2 modules compiled code saves" in page
    assert f"saves {4 * (hidden + of_scales):,} bytes per token, in bf16 {8 * hidden:,}." in page
    f8sub.convert_from_float8(model)
    assert not f8sub.conversion_report(model).swiglu
