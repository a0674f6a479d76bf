"""Our GEMM of scales of blocks, interpreted on the CPU, against float64; which backend is taken, and why."""

import json

import pytest
import torch

import f8sub
from f8sub import ALL, Float8Format, GemmSpec, Operand, ScaleRule, Tile
from f8sub.kernels import reference
from f8sub.kernels.gemm import blockwise as blockwise_gemm
from f8sub.kernels.gemm import measured, select, tuning
from tests.budgets import excess
from tests.data_sets import DTYPES, generator, row_outliers
from tests.kernels.interpreted import interpreted, needs_triton
from tests.kernels.products import BLOCK, E4M3, LARGE, OUR_PAIRS, ROW, TENSOR, VECTOR, operands, product
from tests.selection import long_but

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MEASURED = tuning.FOLDER
VECTOR_OF_2 = Float8Format(E4M3, Tile(1, 128), ScaleRule.POWER_OF_2)
PAIRS = OUR_PAIRS | {
    "1x128-128x128": (VECTOR_OF_2, BLOCK),
    "128x256-384x128": (Float8Format(E4M3, Tile(128, 256)), Float8Format(E4M3, Tile(384, 128))),
    "32x128-1x256": (Float8Format(E4M3, Tile(32, 128)), Float8Format(E4M3, Tile(1, 256))),
}
SHAPES = {"tiles": (128, 128, 256), "ragged": (200, 136, 656), "odd": (13, 7, 200), "one": (1, 1, 1)}
"""M, N, K: whole tiles; tiles and blocks cut at every edge, of a K that TMA takes and of one that it does not."""
on_each_pair = pytest.mark.parametrize("pair", PAIRS)


def multiplied(a: Operand, b: Operand, dtype: torch.dtype, **changes: int) -> torch.Tensor:
    from f8sub.kernels.triton.gemm_launch import Config, multiplication

    config = Config(**{"rows": 64, "cols": 64, "stages": 3, "group": 2, **changes})
    launches, out = multiplication(a, b, dtype, config, 132)
    assert len(launches) == 1 + (config.parts > 1)
    out.view(torch.uint8).fill_(0x7F)
    launches[0].arguments["out_ptr"].view(torch.uint8).fill_(0x7F)
    for launch in launches:
        launch.run()
    return out


def check(pair: str, shape: tuple[int, int, int], dtype: torch.dtype, changes: dict[str, int]) -> None:
    a, b = operands(PAIRS[pair], shape)
    found = multiplied(a, b, dtype, **changes)
    assert found.dtype == dtype
    right = product(a, b)
    assert excess(found, right) <= 1
    if (pair, dtype) == ("1x128-128x128", torch.float32) and shape == SHAPES["ragged"]:  # it would show
        b.scale_inv[1, 2] *= 1 + 2.0**-7
        assert excess(multiplied(a, b, dtype, **changes), right) > 1


@pytest.mark.parametrize("shape", long_but(["ragged", "odd"], SHAPES))
@on_each_pair
def test_products(interpreter, pair, shape):
    interpreter(check, pair, SHAPES[shape], torch.float32, {})


@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], DTYPES.values()), ids=list(DTYPES))
@pytest.mark.parametrize(
    "changes",
    [{"rows": 128, "cols": 128, "warps": 8}, {"rows": 64, "cols": 32, "parts": 3}, {"rows": 16, "cols": 256}],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_tiles_and_dtypes(interpreter, changes, dtype):
    interpreter(check, "1x128-128x128", SHAPES["ragged"], dtype, changes)


@interpreted
def test_nan_shows_where_it_belongs():
    """NaN stays in its row or column, and what is beyond the matrix adds nothing to it."""
    a, b = operands((VECTOR, VECTOR), SHAPES["ragged"], "gaussian")
    a.data[3, 5], b.data[130, 300] = torch.nan, torch.nan
    found = multiplied(a, b, torch.float32).isnan()
    assert found[3].all()
    assert found[:, 130].all()
    assert found.sum() == sum(found.shape) - 1


@interpreted
def test_parts_of_k():
    a, b = operands((LARGE, LARGE), (40, 72, 1500))
    first, second = (multiplied(a, b, torch.bfloat16, parts=4) for _ in range(2))
    assert torch.equal(first, second)
    # More parts than blocks of K: the last ones add nothing.
    assert excess(multiplied(a, b, torch.float32, parts=16), product(a, b)) <= 1


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """An H200 by name and capability, with CUDA 12.9, and a folder of measurements that is empty."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    caches = (tuning.of, blockwise_gemm.why_not_device, measured.winner, blockwise_gemm._config)
    for cache in caches:
        cache.cache_clear()
    yield tmp_path
    for cache in caches:
        cache.cache_clear()


def measure(folder, *rows: tuple[tuple[int, int, int], dict[str, float]]) -> None:
    """As ``scripts/tune_gemm.py`` writes it, of 1x128 by 128x128."""
    config = {"rows": 128, "cols": 256, "stages": 4, "persistent": True, "group": 4, "parts": 1, "warps": 4}
    products = [
        {"a": "e4m3[1x128]", "b": "e4m3[128x128]", "shape": shape, "rates": rates, "config": config}
        for shape, rates in rows
    ]
    (folder / "nvidia_h200.json").write_text(json.dumps({"products": products}))


SPEC = GemmSpec(a=VECTOR_OF_2, b=BLOCK)
SQUARE, WIDE, FEW = (8192, 8192, 8192), (8192, 4096, 14336), (64, 8192, 8192)


@needs_triton
def test_without_measurements_cublaslt_where_it_can_then_ours_then_the_reference(hopper, monkeypatch):
    assert "no measurement of 1x128 e4m3 (power-of-two scales) by 128x128 e4m3 on NVIDIA H200" in str(
        measured.why_not(SPEC.a, SPEC.b, CUDA)
    )
    assert select.select_gemm(SPEC, CUDA) == "scaled_mm"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert select.select_gemm(SPEC, CUDA) == "triton"
    assert select.select_gemm(SPEC, CPU) == "reference"
    with pytest.raises(f8sub.Float8ConfigError, match="triton runs on NVIDIA's GPUs, not on cpu"):
        select.select_gemm(SPEC, CPU, "triton")


@needs_triton
def test_the_faster_one_of_each_shape_is_taken(hopper):
    measure(
        hopper,
        (SQUARE, {"scaled_mm": 1272.0, "triton": 1200.0}),
        (WIDE, {"scaled_mm": 1120.0, "triton": 1250.0}),
        (FEW, {"scaled_mm": 400.0, "triton": 403.0}),
    )
    assert select.select_gemm(SPEC, CUDA) == "measured"
    winners = {
        shape: measured.winner(SPEC.a, SPEC.b, CUDA, shape, False)
        for shape in (SQUARE, WIDE, FEW, (4096, 8192, 8192), (16384, 4096, 12288), (1, 4096, 14336))
    }
    # Within a per cent of each other they count as equal.
    assert list(winners.values()) == ["scaled_mm", "triton", "scaled_mm", "scaled_mm", "triton", "scaled_mm"]
    assert blockwise_gemm._config(SPEC.a, SPEC.b, CUDA, WIDE).group == 4
    assert "no measurement" in str(measured.why_not(SPEC.a, VECTOR, CUDA))
    # Where cuBLASLt always won, it is what is shown.
    tuning.of.cache_clear()
    measure(hopper, (SQUARE, {"scaled_mm": 1272.0, "triton": 1200.0}), (WIDE, {"scaled_mm": 1120.0}))
    assert select.select_gemm(SPEC, CUDA) == "scaled_mm"
    reason = str(measured.why_not(SPEC.a, SPEC.b, CUDA))
    assert "8192x8192x8192: scaled_mm (scaled_mm 1272, triton 1200 TFLOP/s)" in reason


WHOLE = GemmSpec(a=TENSOR, b=TENSOR, fast_accum=True)


def test_whole_tensors_are_multiplied_by_row_where_that_was_faster(hopper, monkeypatch):
    """With the accumulation that it was measured with; elsewhere, and of other formats, cuBLASLt's own kernel is."""
    fast = {"a": "e4m3[allxall]", "b": "e4m3[allxall]", "config": None, "fast_accum": True}
    products = [
        {**fast, "shape": SQUARE, "rates": {"scaled_mm": 1400.0, "by_row": 1390.0}},
        {**fast, "shape": WIDE, "rates": {"scaled_mm": 1250.0, "by_row": 1380.0}},
        {**fast, "shape": WIDE, "rates": {"scaled_mm": 1250.0, "by_row": 1100.0}, "fast_accum": False},
    ]
    (hopper / "nvidia_h200.json").write_text(json.dumps({"products": products}))
    assert select.select_gemm(WHOLE, CUDA) == "measured"
    assert measured.winner(TENSOR, TENSOR, CUDA, WIDE, True) == "by_row"
    assert measured.winner(TENSOR, TENSOR, CUDA, SQUARE, True) == "scaled_mm"
    assert measured.winner(TENSOR, TENSOR, CUDA, WIDE, False) == "scaled_mm"
    # A product of few rows was not measured, nor one of small matrices.
    assert measured.winner(TENSOR, TENSOR, CUDA, FEW, True) == "scaled_mm"
    assert measured.winner(TENSOR, TENSOR, CUDA, (2048, 4096, 14336), True) == "by_row"
    assert measured.winner(TENSOR, TENSOR, CUDA, (512, 4096, 14336), True) == "scaled_mm"
    mixed = GemmSpec(a=Float8Format(torch.float8_e5m2, Tile(ALL, ALL)), b=TENSOR)
    assert select.select_gemm(mixed, CUDA) == "scaled_mm"
    assert "no measurement of tensorwise e5m2" in str(measured.why_not(mixed.a, mixed.b, CUDA))
    # Without cuBLASLt's own scales by row results in float32 would be rounded to bfloat16.
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "by_row needs cuBLASLt's scales by row" in str(measured.why_not(TENSOR, TENSOR, CUDA))


def test_compiled_code_sees_the_kernel_of_a_shape_that_it_knows():
    a, b = operands((TENSOR, TENSOR), (32, 48, 64))
    assert select.GEMM["measured"].is_traceable(a, b)
    assert not select.GEMM["measured"].is_traceable(*operands((VECTOR, BLOCK), (32, 48, 64)))
    sizes = {"M": torch.export.Dim("M", min=32, max=64)}
    seen = []

    class Product(torch.nn.Module):
        def forward(self, codes):
            seen.append(select.GEMM["measured"].is_traceable(a._replace(data=codes), b))
            return codes.float()

    torch.export.export(Product(), (a.data,), dynamic_shapes=({0: sizes["M"]},), strict=False)
    assert seen == [False]


@needs_triton
def test_what_an_h200_takes_by_its_measurements(hopper, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", MEASURED)
    blockwise, gridquant = f8sub.get_recipe("blockwise"), f8sub.get_recipe("gridquant")
    ours = blockwise.fprop, blockwise.dgrad, gridquant.fprop, gridquant.dgrad, gridquant.wgrad
    assert {select.select_gemm(spec, CUDA) for spec in ours} == {"measured"}
    assert select.select_gemm(blockwise.wgrad, CUDA) == "scaled_mm"
    # The table has no products of whole tensors: those take what the user's own table says.
    assert select.select_gemm(f8sub.get_recipe("tensorwise").fprop, CUDA) == "scaled_mm"
    for spec in ours:
        for shape in (SQUARE, WIDE, (16384, 4096, 4096), (14336, 8192, 4096)):
            assert measured.winner(spec.a, spec.b, CUDA, shape, spec.fast_accum) == "triton"
            config = blockwise_gemm._config(spec.a, spec.b, CUDA, shape)
            assert (config.rows, config.cols, config.persistent) == (128, 256, True)


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ((TENSOR, TENSOR), "scaled_mm"),
        ((ROW, ROW), "scaled_mm"),
        ((VECTOR, Float8Format(E4M3, Tile(64, 64))), "not 64x64"),
        ((Float8Format(E4M3, Tile(1, 32), ScaleRule.E8M0),) * 2, "float32 scales"),
    ],
    ids=["tensorwise", "rowwise", "64x64", "mx"],
)
def test_what_it_does_not_multiply(pair, reason):
    assert reason in str(blockwise_gemm.why_not(*pair, CUDA))


@needs_triton
@on_each_pair
def test_what_it_multiplies_on_hopper_and_nowhere_else(hopper, monkeypatch, pair):
    assert blockwise_gemm.why_not(*PAIRS[pair], CUDA) is None
    assert "not on cpu" in str(blockwise_gemm.why_not(*PAIRS[pair], CPU))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    blockwise_gemm.why_not_device.cache_clear()
    assert "found SM 10.0" in str(blockwise_gemm.why_not(*PAIRS[pair], CUDA))


@needs_triton
def test_default_tiles_keep_all_multiprocessors_busy():
    for shape in ((64, 8192, 8192), (1, 8192, 1024), (32, 4096, 4096), (64, 512, 128)):
        config = blockwise_gemm.default_config(shape, 132)
        tiles = -(-shape[2] // config.cols) * config.parts
        assert tiles >= 96 or config.parts == max(1, shape[1] // 512) or config.parts == 8
        assert not config.persistent
    assert blockwise_gemm.default_config((65, 8192, 8192), 132).persistent


@needs_triton
@pytest.mark.parametrize("shape", [(256, 128, 128), (48, 272, 512), (1, 1, 1), (200, 136, 656)])
@on_each_pair
def test_descriptors_of_the_persistent_kernel(pair, shape):
    """What its descriptors refuse on the host: rows that begin elsewhere than at multiples of 16 bytes."""
    from f8sub.kernels.triton.gemm_launch import Config, multiplication

    a, b = operands(PAIRS[pair], shape)
    (launch,), _ = multiplication(a, b, torch.bfloat16, Config(128, 256, 4, persistent=True), 132)
    assert launch.programs == -(-shape[0] // 128) * -(-shape[1] // 256)
    assert launch.arguments["BLOCKS"] == -(-shape[2] // 128)
    for side, operand, lines in (("A", a, 128), ("B", b, 256)):
        scale, edge = launch.arguments[f"{side.lower()}_scale"], launch.arguments[side].edge
        if edge == 1:
            assert scale.block_shape == [1, lines]
            spread = reference.spread(operand.scale_inv, operand.format.tile, operand.data.shape)
            expected = spread.expand(operand.data.shape)[:, ::128].t()
            assert torch.equal(scale.base[:, : operand.data.shape[0]], expected)
        else:
            assert edge % 128 == 0
            assert scale.data_ptr() == operand.scale_inv.data_ptr()


@needs_triton
def test_codes_that_tma_cannot_read_are_copied():
    from f8sub.kernels.triton.gemm_launch import Config, multiplication

    a, b = operands((VECTOR, VECTOR), (16, 32, 200))
    launch = multiplication(a, b, torch.bfloat16, Config(64, 64, 3), 132)[0][0]
    assert launch.arguments["a"].base.shape == (16, 208)
    aligned = row_outliers((16, 224), generator(1)).to(E4M3)
    shifted = Operand(aligned.view(-1)[8 : 8 + 16 * 208].view(16, 208), a.scale_inv, a.format)
    assert shifted.data.data_ptr() % 16 == 8
    launch = multiplication(
        shifted, b._replace(data=aligned[:, :208].contiguous()), torch.bfloat16, Config(64, 64, 3), 132
    )[0][0]
    assert launch.arguments["a"].base.data_ptr() % 16 == 0
    assert torch.equal(launch.arguments["a"].base.view(torch.uint8), shifted.data.view(torch.uint8))
