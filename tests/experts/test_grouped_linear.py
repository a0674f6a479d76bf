"""grouped_linear: every expert's y, dx and dw are those of a Float8Linear on its own tokens, to the bit."""

from itertools import product

import pytest
import torch

import f8sub
from f8sub.kernels.gemm.select import GROUPED, Plan
from f8sub.kernels.grouped.operands import Groups, derive_columnwise
from f8sub.kernels.quantize import derive_columnwise_of_experts, quantize, quantize_experts
from f8sub.weights.master_weight import MasterWeight
from tests.data_sets import gaussian, generator
from tests.experts.oracle import Made, each_expert
from tests.models import refusal

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "gridquant", "mxfp8"]
COUNTS = {
    "even": [64, 64, 64],
    "uneven": [37, 1, 0, 130, 16],
    "first and last empty": [0, 5, 300, 0],
    "all empty": [0, 0],
    "one expert": [33],
}
SHAPES = [(128, 256), (96, 160)]
TAIL = 7
"""Rows of no expert, which hold NaN."""


def tokens(rows: int, cols: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    rng = generator(seed)
    x = (gaussian((rows, cols), rng) * gaussian((rows, 1), rng).exp()).to(dtype)
    x[rows - TAIL :] = torch.nan
    return x


def ran(
    counts: list[int],
    n: int,
    k: int,
    dtype: torch.dtype,
    recipe: str,
    transposed: bool = False,
    backend: str = "auto",
    of_layers: str | None = None,
) -> tuple[Made, Made]:
    """What grouped_linear made, and what each expert's own layer made, by the same backend if no other is named."""
    m = sum(counts) + TAIL
    x, dy = tokens(m, k, 0, dtype), tokens(m, n, 1, dtype)
    w = gaussian((len(counts), n, k), generator(2)).to(dtype)
    stored = (w.transpose(1, 2).contiguous() if transposed else w.clone()).requires_grad_()
    given = x.clone().requires_grad_()
    ends = torch.tensor(counts).cumsum(0)
    y = f8sub.grouped_linear(given, stored, ends, recipe, transposed=transposed, backend=backend)
    y.backward(dy)
    dw = stored.grad.transpose(1, 2) if transposed else stored.grad
    return Made(y.detach(), given.grad, dw), each_expert(x, w, dy, counts, recipe, of_layers or backend)


def check(found: Made, expected: Made) -> None:
    for name, a, b in zip(Made._fields, found, expected, strict=True):
        if name == "dx":
            b = torch.cat([b[: len(b) - TAIL], torch.zeros_like(b[:TAIL])])
        assert torch.equal(a, b), name


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_expert_is_a_float8_linear_on_its_tokens(recipe, counts):
    check(*ran(counts, 96, 160, torch.bfloat16, recipe))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_float32_by_the_backend_that_layers_have(recipe, transposed, backend):
    """Few tokens, too: a CPU sums products of few rows in another order, and backends differ in that."""
    check(*ran([37, 1, 0, 130, 3, 16], 96, 160, torch.float32, recipe, transposed, backend))


DTYPES = [torch.bfloat16, torch.float32, torch.float16]
SEVENTH = list(product(RECIPES, COUNTS.values(), SHAPES, DTYPES, [False, True]))[::7]
MANY = [(recipe, [1] * 257, SHAPES[0], torch.bfloat16, False) for recipe in ("tensorwise", "blockwise")]


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "counts", "shape", "dtype", "transposed"), SEVENTH + MANY)
def test_every_group_shape_dtype_and_layout(recipe, counts, shape, dtype, transposed):
    """Every seventh case of all, in which each two values of different parameters meet; and 257 experts."""
    check(*ran(counts, *shape, dtype, recipe, transposed))


@pytest.mark.parametrize("recipe", RECIPES)
def test_dequantized_products_are_the_references(recipe):
    """On float32 values a CPU sums both alike, up to the order of the sums."""
    for multiple in ("dequantize", "reference"):
        found, expected = ran(
            COUNTS["uneven"], 96, 160, torch.float32, recipe, backend=multiple, of_layers="reference"
        )
        for a, b in zip(found, expected, strict=True):
            b = b.nan_to_num(0)
            assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_groups_that_begin_at_multiples_have_the_same_codes(recipe):
    """As GPUs want them: zeros lie between, and codes and scales are those of groups that touch."""
    counts = COUNTS["uneven"]
    compact = Groups.of(torch.tensor(counts, dtype=torch.int32).cumsum(0).int(), sum(counts) + TAIL)
    x = tokens(compact.rows, 96, 3, torch.bfloat16)
    format = f8sub.get_recipe(recipe).wgrad.b
    if format is None:
        return
    plain, spread = (quantize(x, None, format, groups=compact, multiple=m).columnwise for m in (1, 16))
    assert all(first % 16 == 0 for first in spread.groups.first.tolist())
    for index, (a, b) in enumerate(zip(plain.groups.host_bounds, spread.groups.host_bounds, strict=True)):
        one, other = plain.of_group(index, *a), spread.of_group(index, *b)
        assert torch.equal(one.data.float(), other.data.float())
        assert torch.equal(one.scale_inv.float(), other.scale_inv.float())
    covered = torch.zeros(spread.groups.rows, dtype=torch.bool)
    for first, end in spread.groups.host_bounds:
        covered[first:end] = True
    assert not spread.data.float()[:, ~covered].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_casts_read_nothing_back(recipe):
    """On the meta device reading a value raises."""
    x, ends = torch.empty(300, 160, device="meta"), torch.empty(5, dtype=torch.int32, device="meta")
    found = f8sub.get_recipe(recipe)
    groups = Groups.of(ends, len(x))
    for formats in (found.formats("x"), found.formats("dy")):
        for multiple in (1, 16):
            for made in quantize(x, *formats, groups=groups, multiple=multiple):
                assert made is None or made.dequantize(groups, torch.bfloat16).shape == x.shape
    w = quantize_experts(torch.empty(5, 96, 160, device="meta"), found.fprop.b)
    assert derive_columnwise(w, found.dgrad.b).dequantize(torch.bfloat16).shape == (5, 160, 96)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_casts_are_one_graph(recipe):
    """Of any number of tokens, and the same codes as in eager code."""
    found = f8sub.get_recipe(recipe)

    def cast(x: torch.Tensor, ends: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        tokens = quantize(x, *found.formats("dy"), groups=Groups.of(ends, len(x)), multiple=16)
        rowwise = quantize_experts(w, found.fprop.b)
        operands = (*tokens[:2], rowwise, derive_columnwise_of_experts(rowwise, found.dgrad.b, x))
        return [t.float() for o in operands if o is not None for t in (o.data, o.scale_inv)]

    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    ends, w = torch.tensor([10, 10, 90], dtype=torch.int32), gaussian((3, 96, 160), generator(4)).bfloat16()
    for rows in (100, 120):
        x = gaussian((rows, 160), generator(rows)).bfloat16()
        for a, b in zip(compiled(x, ends, w), cast(x, ends, w), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_outlier_is_its_experts_own(recipe):
    format = f8sub.get_recipe(recipe).fprop.b
    w = gaussian((3, 96, 160), generator(4))
    before = quantize_experts(w.clone(), format)
    w[1, 5, 7] = 1e6
    after = quantize_experts(w, format)
    for index in (0, 2):
        assert torch.equal(before.data[index].float(), after.data[index].float())
        assert torch.equal(before.scale_inv[index].float(), after.scale_inv[index].float())
    assert not torch.equal(before.scale_inv[1].float(), after.scale_inv[1].float())


def test_a_weights_codes_are_kept_until_it_changes():
    master = MasterWeight(gaussian((3, 32, 48), generator(5)))
    w = torch.nn.Parameter(master)
    x, ends = gaussian((20, 48), generator(6)), torch.tensor([5, 5, 20])
    f8sub.grouped_linear(x, w, ends, "tensorwise")
    kept = w.cell.cast
    f8sub.grouped_linear(x, w, ends, "tensorwise")
    assert w.cell.cast is kept
    with torch.no_grad():
        w.mul_(2)
    y = f8sub.grouped_linear(x, w, ends, "tensorwise")
    assert torch.equal(y, f8sub.grouped_linear(x, w.plain, ends, "tensorwise"))


def test_autocast_and_mixed_dtypes():
    x, ends = gaussian((20, 48), generator(6)).requires_grad_(), torch.tensor([5, 5, 20])
    w = gaussian((3, 32, 48), generator(5)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = f8sub.grouped_linear(x, w, ends, "rowwise")
    assert y.dtype == torch.bfloat16
    dy = gaussian(tuple(y.shape), generator(8)).bfloat16()
    y.backward(dy)
    assert (x.grad.dtype, w.grad.dtype) == (torch.float32, torch.float32)
    low_x, own_w = x.detach().bfloat16().requires_grad_(), w.detach().requires_grad_()
    expected = f8sub.grouped_linear(low_x, own_w, ends, "rowwise")
    expected.backward(dy)
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, low_x.grad.float())
    assert torch.equal(w.grad, own_w.grad)


def test_in_high_precision_rows_of_no_expert_are_zero():
    x, w = (
        tokens(20, 48, 7, torch.float32).requires_grad_(),
        gaussian((3, 32, 48), generator(5)).requires_grad_(),
    )
    y = f8sub.grouped_linear(x, w, torch.tensor([5, 5, 20 - TAIL]))
    dy = gaussian(tuple(y.shape), generator(8))
    y.backward(dy)
    for index, rows in ((0, slice(0, 5)), (2, slice(5, 20 - TAIL))):
        assert torch.allclose(y[rows], x[rows] @ w[index].t(), rtol=1e-4, atol=1e-4)
        assert torch.allclose(x.grad[rows], dy[rows] @ w[index], rtol=1e-4, atol=1e-4)
        assert torch.allclose(w.grad[index], dy[rows].t() @ x[rows], rtol=1e-4, atol=1e-4)
    assert not y[20 - TAIL :].any()
    assert not x.grad[20 - TAIL :].any()
    assert not w.grad[1].any()


def test_plans_are_chosen_and_shown():
    cpu = torch.device("cpu")
    for name in ("tensorwise", "rowwise", "blockwise"):
        found, recipe = Plan.make(f8sub.get_recipe(name), cpu, grouped=True), f8sub.get_recipe(name)
        assert [found.fprop, found.dgrad, found.wgrad] == list(Plan.make(recipe, cpu).gemms.values())
    mixed = Plan.make(f8sub.get_recipe("rowwise_with_gw_hp"), cpu, "dequantize", grouped=True).described
    assert mixed == "dequantize, wgrad in high precision"
    assert list(GROUPED) == ["triton", "scaled_grouped_mm", "dequantize", "scaled_mm", "reference"]
    text = refusal(
        f8sub.Float8ConfigError, Plan.make, f8sub.get_recipe("rowwise"), cpu, "scaled_grouped_mm", True
    )
    assert "runs on cuda, not on cpu" in text
    assert "tiles of 128x128" in refusal(
        f8sub.Float8ConfigError, Plan.make, f8sub.get_recipe("blockwise"), cpu, "scaled_mm", True
    )
    assert "triton runs on NVIDIA's GPUs, not on cpu" in refusal(
        f8sub.Float8ConfigError, Plan.make, f8sub.get_recipe("rowwise"), cpu, "triton", True
    )
    assert "'nobody' has no grouped products" in refusal(
        f8sub.Float8ConfigError, Plan.make, f8sub.get_recipe("rowwise"), cpu, "nobody", True
    )


def test_recipes_that_groups_do_not_take():
    for device, backend in (("cuda", "auto"), ("cpu", "triton")):
        asked = f8sub.get_recipe("nvfp4"), torch.device(device), backend
        message = refusal(f8sub.Float8ConfigError, Plan.make, *asked, True)
        assert "by backend 'reference' on a CPU alone" in message
        assert "pack codes" in message


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_packed_codes_expert_by_expert(counts, transposed):
    """What judges the others is how these are computed: this is of their bounds, layouts and gradients."""
    check(*ran(counts, 96, 160, torch.bfloat16, "nvfp4", transposed))


@pytest.mark.parametrize(
    ("x", "w", "ends", "words"),
    [
        ((4, 31), (2, 16, 32), [2, 4], "a weight of (E, N, K)"),
        ((4, 32), (16, 32), [2, 4], "a weight of (E, N, K)"),
        ((1, 4, 32), (2, 16, 32), [2, 4], "a weight of (E, N, K)"),
        ((4, 32), (2, 16, 32), [4], "look at what dispatches the tokens"),
        ((4, 32), (2, 16, 32), [3, 2], "ascend from 0 to at most the 4 rows"),
        ((4, 32), (2, 16, 32), [2, 5], "their counts add up to no more than the rows"),
        ((4, 32), (2, 16, 32), [2.0, 4.0], "ends of groups are a tensor of integers"),
    ],
)
def test_what_does_not_fit(x, w, ends, words):
    call = torch.zeros(x), torch.zeros(w), torch.tensor(ends), "rowwise"
    assert words in refusal(f8sub.Float8ShapeError, f8sub.grouped_linear, *call)


def test_a_recipe_may_be_given_itself():
    x, w = gaussian((16, 32), generator(0)), gaussian((2, 48, 32), generator(1))
    ends = torch.tensor([5, 16])
    given = f8sub.get_recipe("rowwise")
    assert torch.equal(f8sub.grouped_linear(x, w, ends, given), f8sub.grouped_linear(x, w, ends, "rowwise"))


def test_ends_in_a_list():
    call = torch.zeros(4, 32), torch.zeros(2, 16, 32), [2, 4], "rowwise"
    assert "tensor of integers, got list" in refusal(f8sub.Float8ShapeError, f8sub.grouped_linear, *call)


def test_codes_are_no_tokens():
    call = torch.zeros(4, 32, dtype=torch.int64), torch.zeros(2, 16, 32), torch.tensor([2, 4]), "rowwise"
    assert "experts take tokens of" in refusal(TypeError, f8sub.grouped_linear, *call)
