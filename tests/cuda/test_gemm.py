"""Products of cuBLASLt against float64: every pair of tiles it is given, any shape, every output dtype."""

import pytest
import torch

import f8sub
from f8sub import GemmSpec, Operand
from f8sub.kernels import cuda, reference
from f8sub.kernels.gemm import blockwise, scaled_mm, select
from f8sub.kernels.triton import launch, prepared
from tests.budgets import excess
from tests.data_sets import generator, on_each_dtype, row_outliers
from tests.kernels.products import (
    BLOCK,
    BLOCK_PAIRS,
    OUR_PAIRS,
    PAIRS,
    ROW,
    SMALL_BLOCK_PAIRS,
    VECTOR,
    operands,
    product,
    promoted,
)

SHAPES = {
    "aligned": (64, 48, 256),
    "many-blocks": (272, 400, 656),
    "odd": (13, 7, 40),
    "one": (1, 1, 1),
    "one-row": (1, 128, 130),
}
on_each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


def on_gpu(a):
    return a.of(a.format, *(tensor.cuda() for tensor in a.tensors))


def worst(a, b, dtype, fast_accum, backend=scaled_mm) -> float:
    found = backend.gemm_nt(on_gpu(a), on_gpu(b), dtype, fast_accum)
    assert found.dtype == dtype
    # Off Hopper rows are multiplied in CUTLASS, whose results are bf16.
    limited = ROW.tile in (a.format.tile, b.format.tile) and torch.cuda.get_device_capability()[0] != 9
    name = "reference" if backend is reference else "a tensor core"
    accumulated = promoted(name, fast_accum, a.data.shape[1])
    return excess(found.to(torch.bfloat16) if limited else found, product(a, b), accumulated)


@pytest.mark.parametrize("fast_accum", [False, True], ids=["precise", "fast"])
@on_each_dtype
@on_each_shape
@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_one_scale_a_tensor_or_a_row(pair, shape, dtype, fast_accum):
    a, b = operands(pair, shape)
    assert scaled_mm.why_not(a.format, b.format, torch.device("cuda")) is None
    assert worst(a, b, dtype, fast_accum) <= 1


@on_each_dtype
@on_each_shape
@pytest.mark.parametrize(
    "pair", (BLOCK_PAIRS | SMALL_BLOCK_PAIRS).values(), ids=list(BLOCK_PAIRS | SMALL_BLOCK_PAIRS)
)
def test_one_scale_a_block(pair, shape, dtype):
    a, b = operands(pair, shape)
    if reason := scaled_mm.why_not(a.format, b.format, torch.device("cuda")):
        pytest.skip(f"on this CUDA device _scaled_mm {reason}")
    assert worst(a, b, dtype, False) <= 1


@pytest.fixture(params=OUR_PAIRS.values(), ids=list(OUR_PAIRS))
def our_pair(request):
    if reason := blockwise.why_not(*request.param, torch.device("cuda")):
        pytest.skip(f"on this CUDA device triton {reason}")
    return request.param


@on_each_dtype
@on_each_shape
def test_one_scale_a_block_by_our_kernels(our_pair, shape, dtype):
    a, b = operands(our_pair, shape)
    assert worst(a, b, dtype, False, blockwise) <= 1


def drawn_on_gpu(pair, lines: tuple[int, int], depth: int) -> list[Operand]:
    rng = torch.Generator("cuda").manual_seed(1)
    drawn = [torch.randn(count, depth, generator=rng, device="cuda") for count in lines]
    return [reference.quantize(x, format, None)[0] for x, format in zip(drawn, pair, strict=True)]


def test_our_kernels_make_many_tiles_one_after_the_other(our_pair):
    """Programs of the persistent kernel that make three tiles each, twice, to the same bits."""
    a, b = drawn_on_gpu(our_pair, (5000, 2500), 1040)
    found = blockwise.gemm_nt(a, b, torch.float32, False)
    assert torch.equal(found, blockwise.gemm_nt(a, b, torch.float32, False))
    right = reference.gemm_nt(a, b, torch.float32, False)
    assert (found - right).abs().max() < 2**-9 * right.abs().max()


def test_launches_that_are_kept_multiply_other_operands(our_pair, monkeypatch):
    """Of the third and fourth call; launches that are worked out anew make the same bits."""
    monkeypatch.setattr(prepared, "cache", {})
    monkeypatch.setattr(launch, "_seen_once", set())
    for lines in ((512, 384), (16, 384)):
        for seed in range(4):
            rng = torch.Generator("cuda").manual_seed(seed)
            drawn = [torch.randn(count, 640, generator=rng, device="cuda") for count in lines]
            a, b = (cuda.quantize(x, f, None)[0] for x, f in zip(drawn, our_pair, strict=True))
            found = blockwise.gemm_nt(a, b, torch.float32, False)
            with monkeypatch.context() as anew:
                anew.setattr(prepared, "cache", {})
                assert torch.equal(found, blockwise.gemm_nt(a, b, torch.float32, False))
    # Scales of other tiles are copied for the product, whose launches are not kept then.
    assert None not in prepared.cache.values() or not {*our_pair} <= {VECTOR, BLOCK}


@pytest.mark.parametrize("depth", [100, 512, 513, 656, 896])
def test_our_kernels_take_any_number_of_blocks_of_k(our_pair, depth):
    """1, 4, 5, 6 and 7 blocks, of which a pass of the persistent kernel's loop takes one or four."""
    a, b = operands(our_pair, (200, 300, depth))
    assert worst(a, b, torch.float32, False, blockwise) <= 1


def lines_of_infinite_scales(a):
    return reference.spread(a.scale_inv, a.format.tile, a.data.shape).expand(a.data.shape).isinf().any(1)


@pytest.mark.parametrize("depth", [896, 1040], ids=["7-blocks", "9-blocks"])
def test_nan_and_infinity_stay_where_they_belong_in_our_kernels(our_pair, depth):
    """In rows and columns of NaN codes, then of infinite scales; not in what the same registers sum next."""
    a, b = drawn_on_gpu(our_pair, (520, 392), depth)
    scales = a.scale_inv.clone(), b.scale_inv.clone()
    a.scale_inv[0, -1], b.scale_inv[-1, 0] = torch.inf, torch.inf
    rows, cols = lines_of_infinite_scales(a), lines_of_infinite_scales(b)
    assert rows.sum() > 0
    assert cols.sum() > 0
    found = blockwise.gemm_nt(a, b, torch.float32, False)
    assert torch.equal(~found.isfinite(), rows[:, None] | cols)
    a.scale_inv.copy_(scales[0])
    b.scale_inv.copy_(scales[1])
    # 0x7F is NaN in both dtypes.
    a.data.view(torch.uint8)[[3, 200], [5, 700]] = 0x7F
    b.data.view(torch.uint8)[[7, 130], [depth - 10, 300]] = 0x7F
    rows, cols = (torch.zeros(lines, dtype=torch.bool, device="cuda") for lines in (520, 392))
    rows[[3, 200]], cols[[7, 130]] = True, True
    found = blockwise.gemm_nt(a, b, torch.float32, False)
    assert torch.equal(found.isnan(), rows[:, None] | cols)
    assert torch.equal(found.isfinite(), ~found.isnan())


def test_a_wrong_scale_of_one_block_exceeds_the_budget():
    """What makes the budget of a tensor core's sums mean something."""
    a, b = operands((VECTOR, BLOCK), SHAPES["many-blocks"])
    right = product(a, b)
    b.scale_inv[1, 2] *= 2
    found = reference.gemm_nt(on_gpu(a), on_gpu(b), torch.float32, False)
    assert excess(found, right, 128) > 1


def test_blocks_are_multiplied_natively_on_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this CUDA device is no Hopper")
    spec = GemmSpec(a=VECTOR, b=BLOCK)
    assert select.select_gemm(spec, torch.device("cuda")) in ("measured", "scaled_mm")
    for recipe in ("blockwise", "gridquant"):
        plan = select.Plan.make(f8sub.get_recipe(recipe), torch.device("cuda"))
        assert {plan.fprop, plan.dgrad, plan.wgrad} <= {"measured", "scaled_mm"}


def test_small_blocks_are_multiplied_natively_on_blackwell():
    if torch.cuda.get_device_capability()[0] < 10:
        pytest.skip("this CUDA device is older than Blackwell")
    for recipe in ("mxfp8", "nvfp4"):
        plan = select.Plan.make(f8sub.get_recipe(recipe), torch.device("cuda"))
        assert {plan.fprop, plan.dgrad, plan.wgrad} == {"scaled_mm"}


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_reference_does_not_round_its_factors(precision):
    """TF32, which training scripts allow, keeps 11 bits of a code times its scale."""
    a, b = operands((VECTOR, BLOCK), SHAPES["many-blocks"])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert worst(a, b, torch.float32, False, reference) <= 1
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("recipe", f8sub.recipe_names(), ids=f8sub.recipe_names())
def test_float8_tensors_multiply(recipe):
    """``a @ b`` and ``t()``, which moves no bytes, in whatever backend the formats have."""
    x, w = row_outliers((40, 96), generator(1)), row_outliers((32, 96), generator(2))
    a, b = f8sub.quantize(x.cuda(), recipe, operand="x"), f8sub.quantize(w.cuda(), recipe, operand="w")
    cpu = f8sub.quantize(x, recipe, operand="x"), f8sub.quantize(w, recipe, operand="w")
    assert b.t().columnwise.data.data_ptr() == b.rowwise.data.data_ptr()
    backend = select.select_gemm(GemmSpec(a=a.rowwise.format, b=b.rowwise.format), a.device)
    right = product(cpu[0].rowwise, cpu[1].rowwise)
    assert excess(a @ b.t(), right, promoted(backend, False, 96)) <= 1
