"""Codes and scales on a GPU, by Triton's kernels or compiled by Inductor, are the reference's on the CPU bitwise."""

import pytest
import torch

import f8sub
from f8sub import Float8Format, Operand
from f8sub.kernels import cuda, reference
from f8sub.kernels.gemm.block_scales import unflat
from f8sub.kernels.quantize import quantize
from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import support
from tests.data_sets import edge_values, make, on_each_dtype
from tests.kernels import test_pairs as pairs
from tests.kernels import test_quantize_cuda as interpreted
from tests.kernels import test_recasts as recasts
from tests.kernels import test_shard_amaxes as amaxes
from tests.kernels.interpreted import needs_triton
from tests.kernels.products import assert_same_bits
from tests.kernels.quantized import FORMATS, check, check_priors, on_each_format, usages_of
from tests.kernels.test_quotients import binade, right_scales, same
from tests.layers import on_each_recipe
from tests.weights.ranks.test_amax_table import differences

SMALL_SHAPES = [(48, 160), (272, 400), (2, 512), (128, 130)]
SHAPES = [(48, 160), (256, 512), (272, 400), (2048, 1536)]
"""Of more programs than those that are interpreted."""

pytestmark = needs_triton
on_each_operand = pytest.mark.parametrize("operand", ["x", "w", "dy"], ids=["x", "w", "dy"])
of_one_scale = pytest.mark.parametrize("name", ["tensorwise", "tensorwise-e5m2"])


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """Names of the kernels that were launched, and of launches that were known "prepared"."""
    from f8sub.kernels.triton import launch, prepared

    found: list[str] = []
    run, again = launch.Launch.run, prepared.PreparedLaunches.run

    def counted_again(self, *given: object) -> object:
        found.append("prepared")
        return again(self, *given)

    monkeypatch.setattr(prepared.PreparedLaunches, "run", counted_again)
    monkeypatch.setattr(prepared, "cache", {})

    def counted(self: launch.Launch) -> None:
        found.append(self.kernel.fn.__name__)
        run(self)

    monkeypatch.setattr(launch.Launch, "run", counted)
    return found


@on_each_dtype
@on_each_format
def test_every_data_set_shape_and_usage(name, dtype, runs):
    interpreted.test_data_sets_edge_values_and_elements_that_are_not_finite(name, dtype, "cuda")
    interpreted.test_shapes_that_tiles_do_not_divide(name, dtype, "cuda")
    for shape in SHAPES:
        for row, col in usages_of(name):
            runs.clear()
            check(make("lognormal", shape, 3, dtype), row, col, device="cuda")
            assert runs


@pytest.mark.parametrize("name", pairs.PAIRED)
def test_whole_tiles_of_pairs(name, runs):
    pairs.test_whole_tiles(name, "cuda")
    assert pairs.PAIRED[name] in runs
    pairs.test_what_is_not_paired(name, "cuda")


@on_each_dtype
@of_one_scale
def test_scales_of_the_past(name, dtype, runs):
    interpreted.test_scales_of_the_past(name, dtype, "cuda")
    check_priors(name, [make("lognormal", (272, 400), 4, dtype)], "cuda")
    assert set(runs) == {"amax_of_matrix", "cast_with_one"}


@of_one_scale
def test_scales_of_the_past_of_pairs(name, runs):
    pairs.test_pasts(name, 3, "cuda")
    assert "cast_pairs_with_prior" in runs


def test_no_amax_is_looked_for_where_a_past_is_known(runs):
    x = make("lognormal", (272, 400), 4, torch.bfloat16).cuda()
    past = PriorScale(torch.ones(1, 1, device="cuda"), 0.0, covers=False, is_known=True)
    cuda.quantize(x, FORMATS["tensorwise"], FORMATS["tensorwise"], prior=past)
    assert runs == ["cast_with_one"]


def test_amaxes_are_staged(runs):
    interpreted.staging("cuda")
    assert set(runs) == {"stage_amax"}


@on_each_dtype
@on_each_format
def test_parts_with_known_scales(name, dtype, runs):
    interpreted.test_parts_with_known_scales(name, dtype, "cuda")
    assert set(runs) == {"cast_part"}


def test_rows_of_any_width(runs):
    interpreted.test_rows_of_any_width("cuda")
    assert set(runs) == {"quantize_whole_rows", "quantize_rows"}


@on_each_format
def test_many_parts_at_once(name, runs):
    interpreted.test_many_parts_at_once(name, "cuda")
    assert set(runs) - {"prepared"} == {"cast_part", "cast_parts"}


@on_each_format
def test_the_columnwise_usage_of_codes(name, runs):
    recasts.test_the_columnwise_usage_of_codes(name, "cuda")
    assert runs


@pytest.mark.parametrize("name", recasts.RECAST)
def test_every_code_under_many_scales(name, runs):
    recasts.test_every_code_under_many_scales(name, "cuda")
    lines = {"amax_of_code_columns", "requantize_lines"}
    kernels = set(runs) - {"prepared"}
    assert kernels == (lines if FORMATS[name].tile == support.ROWWISE else {"requantize_vectors"})


def test_codes_of_more_elements_than_32_bits_count(runs):
    """The last columns of a matrix of codes whose offsets need 64 bits."""
    format = FORMATS["rowwise"]
    x = torch.randn(65664, 33024, dtype=torch.bfloat16, device="cuda")
    rowwise = cuda.quantize(x, format, None)[0]
    assert rowwise is not None
    found = cuda.derive_columnwise(rowwise, format)
    last = rowwise._replace(data=rowwise.data[:, -256:].cpu().contiguous(), scale_inv=rowwise.scale_inv.cpu())
    right = reference.derive_columnwise(last, format)
    assert_same_bits(found._replace(data=found.data[-256:], scale_inv=found.scale_inv[-256:]), right)
    assert runs == ["quantize_rows", "amax_of_code_columns", "requantize_lines"]


def test_more_elements_than_32_bits_count(runs):
    """The last tiles of a matrix whose offsets need 64 bits."""
    format = FORMATS["1x128"]
    x = torch.randn(33024, 65664, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    row, col, _ = cuda.quantize(x, format, format)
    assert row is not None
    assert col is not None
    last_rows, *_ = reference.quantize(x[-256:].cpu(), format, None)
    _, last_cols, _ = reference.quantize(x[:, -256:].cpu().contiguous(), None, format)
    assert last_rows is not None
    assert last_cols is not None
    assert_same_bits(row._replace(data=row.data[-256:], scale_inv=row.scale_inv[-256:]), last_rows)
    assert_same_bits(col._replace(data=col.data[-256:], scale_inv=col.scale_inv[-256:]), last_cols)
    assert runs == ["quantize_paired_vectors"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "gridquant", "delayed"])
def test_a_layer_shows_and_runs_them(recipe, runs):
    layer = f8sub.convert_to_float8(
        torch.nn.Sequential(torch.nn.Linear(256, 384, bias=False, device="cuda", dtype=torch.bfloat16)),
        recipe=recipe,
    )[0]
    assert "reference" not in repr(layer)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.backward(torch.randn_like(y))
    assert len(runs) >= 3


def test_formats_without_a_kernel_say_so():
    format = Float8Format(torch.float8_e4m3fn, f8sub.Tile(32, 32))
    assert support.why_no_kernel(format) is not None
    check(make("gaussian", (48, 80), 1), format, format, device="cuda")


@pytest.mark.parametrize("top", [448.0, 57344.0])
def test_every_amax_has_the_scale_of_ieee(top):
    from tests.kernels.quotients import scales

    for exponent in range(-127, 128):
        amax = binade(exponent).cuda()
        assert bool(same(scales(amax, top, 4096), right_scales(amax, top)).all()), exponent


def test_every_scale_has_the_inverse_of_ieee():
    from tests.kernels.quotients import inverses

    for exponent in range(-126, 127):
        scale = binade(exponent)[: 1 if exponent == 126 else None].cuda()
        assert bool(same(inverses(scale, 4096), scale.double().reciprocal().float()).all()), exponent


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_amaxes_of_all_tiles_and_dtypes(seed, runs):
    amaxes.test_amaxes_of_all_tiles_and_dtypes(seed, "cuda")
    assert runs == ["amaxes_of_many"] * 4


def test_amaxes_of_edge_values(runs):
    amaxes.test_amaxes_of_edge_values("cuda")
    assert set(runs) == {"amaxes_of_many"}


def test_scales_of_many_amaxes(runs):
    amaxes.test_scales_of_many_amaxes("cuda")
    assert set(runs) == {"scales_of_many"}


def differences_on_gpu(rank: int, world: int, recipe: str) -> tuple[list[str], list[str], int]:
    return differences(recipe, False, "cuda")


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "gridquant"])
def test_tables_are_those_of_torchs_operators(ranks, recipe):
    ((wrong, launched, planned),) = ranks(1, differences_on_gpu, recipe, gpus=True, timeout=120)
    assert wrong == []
    of_tables = [name for name in launched if name.endswith("_of_many")]
    # Scales of the weights of bfloat16, and of those of float32.
    assert of_tables == ["amaxes_of_many", *["scales_of_many"] * 2] * 4
    assert planned == 2


@on_each_dtype
@on_each_operand
@on_each_recipe
def test_both_usages_of_each_operand(recipe, operand, dtype):
    matrices = [make("lognormal", shape, 3, dtype) for shape in SMALL_SHAPES]
    matrices[0][3, 4], matrices[0][7, 9], matrices[0][20, 0] = float("nan"), float("inf"), float("-inf")
    for matrix in (*matrices, *edge_values(dtype).values()):
        expected = f8sub.quantize(matrix, recipe, operand=operand)
        found = f8sub.quantize(matrix.cuda(), recipe, operand=operand)
        assert_same_bits(found.rowwise, expected.rowwise)
        assert_same_bits(found.columnwise, expected.columnwise)


def both_usages(x: torch.Tensor, formats: tuple) -> list[torch.Tensor]:
    return [t for operand in quantize(x, *formats) if operand is not None for t in operand.tensors]


@on_each_dtype
@on_each_operand
@on_each_recipe
def test_compiled_by_inductor(recipe, operand, dtype):
    formats = f8sub.get_recipe(recipe).formats(operand)
    torch._dynamo.reset()
    compiled = torch.compile(both_usages, fullgraph=True)
    for data in ("gaussian", "lognormal"):
        matrix = make(data, (144, 304), 5, dtype)
        found = compiled(matrix.cuda(), formats)
        for expected in filter(None, quantize(matrix, *formats)):
            count = len(expected.tensors)
            assert_same_bits(unflat(Operand.of(expected.format, *found[:count])), expected)
            found = found[count:]


def product_of_large_numbers(gate: torch.Tensor, up: torch.Tensor, formats: tuple) -> list[torch.Tensor]:
    return both_usages(torch.nn.functional.silu(gate) * up, formats)


@on_each_dtype
def test_products_of_large_numbers_are_cast_as_they_are(dtype):
    """Inductor multiplies and casts in one kernel, whose fused instructions keep what a product's rounding drops."""
    formats = f8sub.get_recipe("tensorwise").formats("dy")
    gate, up = (make("gaussian", (144, 304), seed, dtype) * size for seed, size in ((5, 1), (6, 2.0**12)))
    if dtype != torch.float16:
        gate, up = gate * 2.0**40, up * 2.0**40
    torch._dynamo.reset()
    codes, scale_inv = torch.compile(product_of_large_numbers, fullgraph=True)(
        gate.cuda(), up.cuda(), formats
    )[:2]
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    found = codes.cpu().double() * scale_inv.cpu().double()
    # Half a step of e5m2, and the roundings of the dtype.
    near = (found - exact).abs() <= exact.abs() * 2**-3 * 1.1 + scale_inv.cpu().double() * 2.0**-16
    assert near.all()
