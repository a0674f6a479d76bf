"""Experts on a GPU: what the grouped products there make of the same codes, without waiting for the host."""

import pytest
import torch

import f8sub
from f8sub.experts import seams
from f8sub.experts.adapters import Adapted, Added
from f8sub.kernels import cuda
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.grouped import operands
from f8sub.kernels.grouped.operands import EACH, Groups
from f8sub.kernels.quantize import quantize
from tests.data_sets import DTYPES, gaussian, generator
from tests.experts import test_async_dispatch as async_dispatch
from tests.experts import test_sent as sent
from tests.experts.ranks import test_exchange
from tests.experts.test_conversion import registered  # noqa: F401
from tests.kernels import test_gated as swiglu
from tests.kernels import test_quantize_experts as weights
from tests.kernels import test_quantize_groups as casts
from tests.kernels import test_row_bytes as row_bytes
from tests.kernels import test_taken as rows
from tests.selection import of_torchtitan_0_3

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
        Plan.make(f8sub.get_recipe(recipe), DEVICE, backend, grouped=True)
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
    """Ours on Hopper, torch's own one scale a row elsewhere."""
    capability = torch.cuda.get_device_capability()
    for recipe in ("rowwise", "blockwise", "gridquant", "tensorwise"):
        plan = Plan.make(f8sub.get_recipe(recipe), DEVICE, grouped=True)
        if capability == (9, 0):
            assert {plan.fprop, plan.dgrad, plan.wgrad} == {"triton"}
    assert Plan.make(f8sub.get_recipe("mxfp8"), DEVICE, grouped=True).fprop == "dequantize"


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


@pytest.mark.parametrize("side", swiglu.SIDES)
@pytest.mark.parametrize("name", swiglu.KERNELS)
def test_swiglu_in_the_cast_has_the_codes_of_torchs(name, side):
    """But where an exponential's last bit rounds to the next bfloat16, and that to the next code."""
    if side == EACH and name not in ("tensorwise", "tensorwise-e5m2", "rowwise"):
        pytest.skip("two matrices at once have scales of groups")
    groups, format = casts.on("cuda", casts.groups_of([1000, 0, 37, 5000])), casts.GROUP_FORMATS[name]
    source = swiglu.gated(groups, side, "cuda", together=side != EACH)
    found = cuda.quantize_computed(source, groups, format, format, 128)
    right = operands.quantize_computed(source, groups, format, format, 128)
    rows = int(groups.ends[-1])
    for codes, wanted in zip(found, right, strict=True):
        a, b = (one.data.view(torch.uint8) for one in (codes, wanted))
        if not codes.contracted and wanted.groups is groups:
            a, b = (part.unflatten(0, (-1, groups.rows))[:, :rows] for part in (a, b))
        assert (a == b).float().mean() > 0.999


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "gridquant"])
def test_a_feed_forward_layer_is_three_products(recipe, together):
    """Of tokens whose casts compute SwiGLU; launched, in a graph, and compiled."""
    runs(recipe, "auto")
    width, hidden, counts = 512, 256, [300, 0, 37, 700]
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    rng = generator(3)
    shapes = [(2 * hidden, width)] if together else [(hidden, width)] * 2
    x, dy = (gaussian((sum(counts) + TAIL, width), rng).bfloat16().to(DEVICE) for _ in range(2))
    weights = [
        (gaussian((len(counts), *shape), rng) / 16).bfloat16().to(DEVICE)
        for shape in (*shapes, (width, hidden))
    ]
    given = [tensor.requires_grad_() for tensor in (x, *weights)]

    def at_once(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        up = None if together else weights[1]
        return f8sub.grouped_swiglu(x, weights[0], up, weights[-1], ends, recipe)

    def by_product(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        made = [f8sub.grouped_linear(x, w, ends, recipe) for w in weights[:-1]]
        gate, up = made if len(made) == 2 else made[0].chunk(2, 1)
        return f8sub.grouped_linear(torch.nn.functional.silu(gate) * up, weights[-1], ends, recipe)

    def step(call) -> list[torch.Tensor]:
        y = call(*given)
        return [y.detach(), *torch.autograd.grad(y, given, dy)]

    right, launched = step(by_product), step(at_once)
    for a, b in zip(launched, right, strict=True):
        assert (a.float() - b.float()).norm() <= 4e-3 * b.float().norm()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(at_once)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(at_once)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, launched))
    for a, b in zip(step(torch.compile(at_once, fullgraph=True)), launched, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", rows.KINDS)
@pytest.mark.parametrize("factors", rows.FACTORS)
@pytest.mark.parametrize("name", rows.KERNELS)
def test_pairs_are_looked_up(name, factors, kind):
    rows.test_pairs_of_elements_are_those_of_rows_put_together(name, factors, kind, "cuda")


@pytest.mark.parametrize(("name", "factors", "dtype"), rows.LINES)
def test_elements_of_any_dtype_are_looked_up(name, factors, dtype):
    rows.test_elements_of_any_dtype_are_those_of_rows_put_together(name, factors, dtype, "cuda")


@pytest.mark.parametrize("usages", casts.USAGES)
@pytest.mark.parametrize("factors", rows.FACTORS)
@pytest.mark.parametrize("name", casts.GROUP_FORMATS)
def test_many_rows_are_looked_up(name, factors, usages):
    """More programs than run at once: with both usages some groups' amaxes are found while others are cast."""
    groups = casts.groups_of([4000, 0, 37, 21000])
    source, matrix = rows.taken(groups, factors, cols=1024)
    rows.cast(rows.to("cuda", source), matrix, groups, name, usages)


class Routed(torch.nn.Module):
    """Experts with what ``seams.routed`` reads of those of transformers."""

    is_transposed = False

    def __init__(self) -> None:
        super().__init__()
        rng = generator(3)
        shapes = (sent.EXPERTS, 512, 512), (sent.EXPERTS, 512, 256)
        gate_up, down = ((gaussian(shape, rng) / 16).bfloat16() for shape in shapes)
        self.gate_up_proj, self.down_proj = map(torch.nn.Parameter, (gate_up, down))
        self.act_fn = torch.nn.SiLU()


@pytest.mark.parametrize("factors", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "gridquant"])
def test_experts_read_tokens_where_they_lie(recipe, factors, registered):  # noqa: F811
    """As if they were sorted first, without waiting; launched, in a graph, and compiled."""
    runs(recipe, "auto")
    weights_of = "gate_up_proj", "down_proj"
    f8sub.register_experts(Routed, weights=weights_of, forward=seams.routed, down="down_proj")
    module = f8sub.convert_to_float8(torch.nn.Sequential(Routed()), recipe, experts=True)[0].to(DEVICE)
    rng, tokens = generator(1), 1000
    x, dy = (gaussian((tokens, 512), rng).bfloat16().to(DEVICE) for _ in range(2))
    chosen = torch.randint(sent.EXPERTS + sent.ELSEWHERE, (tokens, 8), generator=rng).to(DEVICE)
    by = torch.rand(tokens, 8, generator=rng).to(DEVICE, factors)
    by[chosen >= sent.EXPERTS] = torch.nan
    given = [x.requires_grad_(), by.requires_grad_(), *module.parameters()]

    def step(call) -> list[torch.Tensor]:
        y = call(x, chosen, by)
        return [y.detach(), *torch.autograd.grad(y, given, dy)]

    step(module)  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = step(module)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    right = step(lambda *args: sent.sorted_first(module, recipe, *args))
    assert all(map(torch.equal, launched, right))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(module)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(module)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, launched))
    # The compiler rounds products with the router's weights once, with their sum.
    for a, b in zip(step(torch.compile(module, fullgraph=True)), launched, strict=True):
        assert (a.float() - b.float()).norm() <= 1e-2 * b.float().norm()


@pytest.mark.parametrize("kind", casts.COUNTS)
@pytest.mark.parametrize("name", casts.GROUP_FORMATS)
def test_casts_of_groups_are_the_references(name, kind):
    casts.test_groups_of_any_size(name, kind, "cuda")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", casts.GROUP_FORMATS)
def test_casts_of_data_sets_and_edge_values_are_the_references(name, dtype):
    casts.test_data_sets_edge_values_and_elements_that_are_not_finite(name, dtype, "cuda")


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_groups_begin_at_multiples(name):
    casts.test_groups_begin_at_multiples(name, "cuda")


@pytest.mark.parametrize("kind", casts.COUNTS)
@pytest.mark.parametrize("name", casts.IN_TURN)
def test_amaxes_of_some_groups_are_found_while_others_are_cast(name, kind):
    casts.test_amaxes_of_some_groups_are_found_while_others_are_cast(name, kind, "cuda")


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_many_programs_in_turn_make_the_references_codes(name):
    """More than run at once, of even groups, and where one has almost all tokens."""
    for counts in ([1024] * 32, [20000, 1, 0] + [300] * 32):
        groups = casts.groups_of(counts)
        x = casts.spoiled(gaussian((groups.rows, 1024), generator(3)).bfloat16(), groups)
        casts.check(x, groups, casts.GROUP_FORMATS[name], multiple=128, device="cuda")


@pytest.mark.parametrize("name", casts.GROUP_FORMATS)
def test_many_tokens_are_cast_as_the_reference_does(name):
    """Programs run side by side: of groups that end within tiles, and of one that takes almost all tokens."""
    for counts in ([1000, 3, 0, 2093, 16, 700], [5, 4000, 1] + [0, 7] * 40):
        groups = casts.groups_of(counts)
        x = casts.spoiled(gaussian((groups.rows, 1024), generator(3)).bfloat16(), groups)
        casts.check(x, groups, casts.GROUP_FORMATS[name], device="cuda")


@pytest.mark.parametrize("name", casts.GROUP_FORMATS)
def test_a_cast_waits_for_nothing_and_is_captured_in_a_graph(name):
    """Replayed with other groups, the graph makes their codes."""
    format, counts = casts.GROUP_FORMATS[name], ([37, 1, 0, 130, 16], [0, 100, 60, 0, 20])
    groups = casts.groups_of(counts[0])
    x = gaussian((groups.rows, 272), generator(3)).bfloat16().to(DEVICE)
    given = casts.on("cuda", groups)

    def cast() -> list[torch.Tensor]:
        made = quantize(x, format, format, groups=given, multiple=16)
        parts = [part for codes in made[:2] for part in (codes.data, codes.scale_inv)]
        return [part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts]

    cast()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cast()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cast()
    other = casts.on("cuda", Groups.of(torch.tensor(counts[1]).cumsum(0).int(), groups.rows))
    given.ends.copy_(other.ends)
    given.first.copy_(other.first)
    for part in captured:
        part.zero_()
    graph.replay()
    end = sum(counts[1])
    for replayed, eager in zip(captured, cast(), strict=True):
        rows = end if replayed.shape[0] == groups.rows else None
        assert torch.equal(replayed[:rows], eager[:rows])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", casts.GROUP_FORMATS)
def test_casts_of_weights_are_the_specifications(name, dtype):
    weights.test_each_experts_tiles_begin_anew(name, dtype, "cuda")


@pytest.mark.parametrize("name", casts.GROUP_FORMATS)
def test_columns_of_weights_codes_are_the_specifications(name):
    weights.test_columns_are_derived_of_each_experts_codes(name, "cuda")


def test_all_experts_rows_as_one_matrix():
    weights.test_all_experts_rows_as_one_matrix("cuda")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_adapters_beside_the_codes(counts, transposed):
    """Of rank 4, which no grouped product takes: y and both factors' gradients, without those of rows of no expert."""
    rows, rng = sum(counts) + TAIL, generator(5)
    x, dy = (gaussian((rows, k), rng).bfloat16() for k in (160, 96))
    x[rows - TAIL :] = dy[rows - TAIL :] = torch.nan
    stored = (160, 96) if transposed else (96, 160)
    w, lhs, rhs = (
        gaussian((len(counts), *shape), rng).bfloat16() for shape in (stored, (stored[0], 4), (4, stored[1]))
    )
    x, dy, w, lhs, rhs = (tensor.to(DEVICE) for tensor in (x, dy, w, lhs, rhs))
    ends = torch.tensor(counts, device=DEVICE).cumsum(0)
    lhs.requires_grad_()
    rhs.requires_grad_()
    weight = Adapted(w, (Added(lhs, rhs, 0.5),))
    y = f8sub.grouped_linear(x, weight, ends, "rowwise", transposed=transposed)
    y.backward(dy)
    assert not y[rows - TAIL :].any()
    base = f8sub.grouped_linear(x, w, ends, "rowwise", transposed=transposed)
    found = [y.detach() - base, lhs.grad, rhs.grad]
    left, right = (factor.detach().float().requires_grad_() for factor in (lhs, rhs))
    delta = 0.5 * left @ right
    expected = torch.cat(
        [
            part.float() @ (each if transposed else each.t())
            for part, each in zip(x[: rows - TAIL].split(counts), delta, strict=True)
        ]
    )
    expected.backward(dy[: rows - TAIL].float())
    for a, b in zip(found, (expected, left.grad, right.grad), strict=True):
        b = torch.cat([b, b.new_zeros(TAIL, *b.shape[1:])]) if len(b) == rows - TAIL else b
        assert (a.float() - b.float()).norm() <= 2e-2 * b.float().norm()


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_tokens_cross_in_float8_over_nccl(ranks, recipe):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    test_exchange.check(ranks(2, test_exchange.compared, recipe, torch.bfloat16, "cuda", gpus=True))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_torchtitans_minimal_async_ep(ranks, recipe):
    of_torchtitan_0_3("torchtitan.models.common.token_dispatcher")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    by_rank = ranks(2, async_dispatch.on_a_gpu, recipe, gpus=True)
    async_dispatch.check(list(zip(*by_rank, strict=True)), recipe)


@pytest.mark.parametrize(("name", "dtype"), row_bytes.CASES)
def test_values_of_rows_of_bytes(name, dtype):
    row_bytes.test_values_of_rows(name, dtype, "cuda")
