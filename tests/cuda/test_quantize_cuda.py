"""Triton's quantizers on a GPU equal the reference on the CPU bitwise, and they are what runs there."""

import pytest
import torch

import f8sub
from f8sub import Float8Format
from f8sub.kernels import reference
from f8sub.kernels.gemm import select
from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import quantize_cuda, support
from tests.cuda.products import assert_same_bits
from tests.data_sets import DATA_SETS, edge_values, make
from tests.kernels import test_paired as pairs
from tests.kernels.interpreted import needs_triton
from tests.kernels.quantized import DTYPES, FORMATS
from tests.kernels.test_derived_columns import RECAST, every_value
from tests.kernels.test_fused import parts, staging

SHAPES = [(48, 160), (256, 512), (272, 400), (130, 144), (129, 130), (1, 300), (300, 1), (2048, 1536)]
pytestmark = needs_triton
on_each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """Names of the kernels that were launched."""
    from f8sub.kernels.triton import launcher

    found: list[str] = []
    run = launcher.Launch.run

    def counted(self: launcher.Launch) -> None:
        found.append(self.kernel.fn.__name__)
        run(self)

    monkeypatch.setattr(launcher.Launch, "run", counted)
    return found


def check(x: torch.Tensor, row: Float8Format | None, col: Float8Format | None) -> None:
    found = quantize_cuda.quantize(x.cuda(), row, col)
    for ours, right in zip(found, reference.quantize(x, row, col), strict=True):
        assert_same_bits(ours, right)
        assert ours is None or ours.data.is_contiguous()


@on_each_dtype
@on_each_format
def test_every_data_set_shape_and_usage(format, dtype, runs):
    for data in DATA_SETS:
        for shape in SHAPES:
            x = make(data, shape, 3, dtype)
            x = x.where(x.isfinite(), 1e4)
            for row, col in ((format, format), (format, None), (None, format)):
                runs.clear()
                check(x, row, col)
                assert runs


@on_each_dtype
@on_each_format
def test_edge_values_and_non_finite_elements(format, dtype):
    for x in edge_values(dtype).values():
        check(x, format, format)
        x[3, 4], x[7, 9], x[15, 0] = float("nan"), float("inf"), float("-inf")
        check(x, format, format)
        check(torch.full_like(x, float("nan")), format, format)


@pytest.mark.parametrize("name", pairs.PAIRED)
def test_whole_tiles_of_pairs(name, runs):
    pairs.check_tiles(name, "cuda")
    assert pairs.PAIRED[name] in runs
    pairs.check_what_is_not_paired(name, "cuda")


@on_each_dtype
@pytest.mark.parametrize("name", ["tensorwise", "tensorwise-e5m2"])
def test_scales_of_the_past(name, dtype, runs):
    format = FORMATS[name]
    for x in (make("lognormal", (272, 400), 4, dtype), *edge_values(dtype).values()):
        for scale in (0.0, 1.0, 3.7e3, 2.0**-120):
            for covers, known in ((False, False), (True, False), (False, scale != 0), (True, scale != 0)):
                past = PriorScale(torch.full((1, 1), scale), 1.0, covers, known)
                on_gpu = past._replace(scale=past.scale.cuda())
                found = quantize_cuda.quantize(x.cuda(), format, format, prior=on_gpu)
                expected = reference.quantize(x, format, format, prior=past)
                assert_same_bits(found[0], expected[0])
                assert_same_bits(found[1], expected[1])
                torch.testing.assert_close(found[2].cpu(), expected[2], rtol=0, atol=0, equal_nan=True)
    assert set(runs) == {"amax_of_matrix", "cast_with_one"}


@pytest.mark.parametrize("name", ["tensorwise", "tensorwise-e5m2"])
def test_scales_of_the_past_of_pairs(name, runs):
    pairs.check_pasts(name, "cuda")
    assert "cast_pairs_with_prior" in runs


def test_no_amax_is_looked_for_where_a_past_is_known(runs):
    x = make("lognormal", (272, 400), 4, torch.bfloat16).cuda()
    past = PriorScale(torch.ones(1, 1, device="cuda"), 0.0, covers=False, is_known=True)
    quantize_cuda.quantize(x, FORMATS["tensorwise"], FORMATS["tensorwise"], prior=past)
    assert runs == ["cast_with_one"]


def test_amaxes_are_staged(runs):
    staging("cuda")
    assert set(runs) == {"stage_amax"}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_parts_with_known_scales(name, dtype, runs):
    parts(name, dtype, "cuda")
    assert set(runs) == {"cast_part"}


@on_each_format
def test_the_columnwise_usage_of_codes(format, runs):
    for shape in SHAPES:
        rowwise = reference.quantize(make("gaussian", shape, 6), format, None)[0]
        assert rowwise is not None
        on_gpu = rowwise._replace(data=rowwise.data.cuda(), scale_inv=rowwise.scale_inv.cuda())
        assert_same_bits(
            quantize_cuda.derive_columnwise(on_gpu, format), reference.derive_columnwise(rowwise, format)
        )
    assert runs


@pytest.mark.parametrize("name", RECAST)
def test_every_code_under_many_scales(name, runs):
    every_value(FORMATS[name], "cuda")
    lines = {"amax_of_code_columns", "recast_by_lines"}
    assert set(runs) == (lines if FORMATS[name].tile == support.ROWWISE else {"recast_by_vectors"})


def test_codes_of_more_elements_than_32_bits_count(runs):
    """The last columns of a matrix of codes whose offsets need 64 bits."""
    format = FORMATS["rowwise"]
    x = torch.randn(65664, 33024, dtype=torch.bfloat16, device="cuda")
    rowwise = quantize_cuda.quantize(x, format, None)[0]
    assert rowwise is not None
    found = quantize_cuda.derive_columnwise(rowwise, format)
    last = rowwise._replace(data=rowwise.data[:, -256:].cpu().contiguous(), scale_inv=rowwise.scale_inv.cpu())
    right = reference.derive_columnwise(last, format)
    assert_same_bits(found._replace(data=found.data[-256:], scale_inv=found.scale_inv[-256:]), right)
    assert runs == ["quantize_rows", "amax_of_code_columns", "recast_by_lines"]


def test_more_elements_than_32_bits_count(runs):
    """The last tiles of a matrix whose offsets need 64 bits."""
    format = FORMATS["1x128"]
    x = torch.randn(33024, 65664, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    row, col, _ = quantize_cuda.quantize(x, format, format)
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
    assert layer.plan.quantizers == "triton"
    assert "reference" not in repr(layer)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.backward(torch.randn_like(y))
    assert len(runs) >= 3


def test_in_a_cuda_graph():
    x = torch.randn(272, 400, device="cuda", dtype=torch.bfloat16)
    for format in FORMATS.values():
        quantize_cuda.quantize(x, format, format)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            row, col, _ = quantize_cuda.quantize(x, format, format)
        x.copy_(torch.randn_like(x))
        graph.replay()
        for ours, right in zip((row, col), reference.quantize(x.cpu(), format, format)[:2], strict=True):
            assert_same_bits(ours, right)


def test_formats_without_a_kernel_say_so():
    format = Float8Format(torch.float8_e4m3fn, f8sub.Tile(32, 32))
    assert select.quantizer_of(format, torch.device("cuda", 0)) == "reference"
    check(make("gaussian", (48, 80), 1), format, format)
