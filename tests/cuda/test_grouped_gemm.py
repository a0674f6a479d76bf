"""Products by groups on Hopper against float64: every pair of scales, any lie of groups, every kernel."""

import pytest
import torch

from f8sub import ALL, Operand, Tile
from f8sub.kernels import reference
from f8sub.kernels.gemm.tuning import GroupedConfig, Rows
from f8sub.kernels.grouped import gemm
from f8sub.kernels.triton import launch, prepared
from tests.budgets import excess
from tests.kernels.grouped import GROUPS, PAIRS, TAIL, ByRows, OverRows, rows_of

CONFIGS = {
    f"persistent, {blocks} blocks": GroupedConfig(128, 256, 4, persistent=True, group=16, blocks=blocks)
    for blocks in (4, 2, 1)
} | {"128x128": GroupedConfig(128, 128, 4), "64x128": GroupedConfig(64, 128, 4, warps=4)}
RECIPES_PAIRS = ["rowwise", "tensorwise e5m2", "1x128 x 128x128"]
SHAPES = {"whole": (256, 512), "ragged": (400, 144), "one tile": (16, 16)}
"""N and K."""

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
on_each_pair = pytest.mark.parametrize("pair", PAIRS)
on_each_lie = pytest.mark.parametrize("counts", GROUPS.values(), ids=list(GROUPS))
on_each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
on_two_configs = pytest.mark.parametrize("config", [None, CONFIGS["128x128"]], ids=["default", "128x128"])


@pytest.fixture(autouse=True)
def hopper():
    if reason := gemm.why_not_triton(*PAIRS["rowwise"], torch.device("cuda")):
        pytest.skip(f"on this CUDA device triton {reason}")


def on_gpu(a: Operand) -> Operand:
    return a.of(a.format, *(tensor.cuda() for tensor in a.tensors))


def fits(config: GroupedConfig | None, pair: str) -> None:
    """Columns with scales of their own for each block leave no registers for a longer pass."""
    tile = PAIRS[pair][1].tile
    if config is not None and config.blocks > 1 and tile.rows == 1 and tile.cols != ALL:
        pytest.skip("the kernel would spill registers")


def sums_in(pair: str, depth: int, fast: bool) -> int:
    """Elements of K in a tensor core's accumulator."""
    return depth if fast and all(f.tile.cols == ALL for f in PAIRS[pair]) else reference.PROMOTION


def rows_on_gpu(rows: Rows) -> Rows:
    return Rows(*(part.cuda() for part in rows[:3]), rows.total)


def given_to(case: ByRows | OverRows) -> tuple[Operand, Operand, Rows]:
    a, b, rows = case.operands()
    return on_gpu(a), on_gpu(b), rows_on_gpu(rows)


def by_rows(case: ByRows, dtype: torch.dtype, fast: bool = False, config: GroupedConfig | None = None):
    given = given_to(case)
    # What the allocator hands out next held NaN.
    torch.full((given[2].total, case.cols), torch.nan, dtype=dtype, device="cuda")
    return gemm.triton_by_rows(*given, dtype, fast, config)


def over_rows(case: OverRows, dtype: torch.dtype, fast: bool = False, config: GroupedConfig | None = None):
    given = given_to(case)
    torch.full((len(case.counts), case.cols, case.depth), torch.nan, dtype=dtype, device="cuda")
    return gemm.triton_over_rows(*given, dtype, fast, config)


def check_rows(case: ByRows, out: torch.Tensor, promoted: int) -> None:
    *found, past = case.split(out)
    assert not past.any()
    for part, right in zip(found, case.groups_right(), strict=True):
        assert excess(part, right, promoted) <= 1


def check_sums(case: OverRows, out: torch.Tensor, pair: str, fast: bool) -> None:
    for part, right, count in zip(out, case.groups_right(), case.counts, strict=True):
        if right is None:
            assert not part.any()
        else:
            assert excess(part, right, sums_in(pair, count, fast)) <= 1


@on_each_lie
@on_each_pair
def test_rows_by_the_matrix_of_their_group(pair, counts):
    case = ByRows(PAIRS[pair], counts, *SHAPES["ragged"])
    check_rows(case, by_rows(case, torch.float32), reference.PROMOTION)


@on_each_lie
@on_each_pair
def test_sums_over_the_rows_of_each_group(pair, counts):
    case = OverRows(PAIRS[pair], counts, *SHAPES["ragged"])
    check_sums(case, over_rows(case, torch.float32), pair, fast=False)


@on_each_config
@on_each_lie
@pytest.mark.parametrize("pair", RECIPES_PAIRS)
def test_tiles(pair, counts, config):
    fits(config, pair)
    rows, sums = (make(PAIRS[pair], counts, *SHAPES["ragged"]) for make in (ByRows, OverRows))
    check_rows(rows, by_rows(rows, torch.float32, config=config), reference.PROMOTION)
    check_sums(sums, over_rows(sums, torch.float32, config=config), pair, fast=False)


@on_two_configs
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fast", [False, True], ids=["precise", "fast"])
def test_shapes_dtypes_and_accumulation(fast, dtype, shape, config):
    rows, sums = (make(PAIRS["rowwise"], GROUPS["ragged"], *shape) for make in (ByRows, OverRows))
    check_rows(rows, by_rows(rows, dtype, fast, config), sums_in("rowwise", shape[1], fast))
    check_sums(sums, over_rows(sums, dtype, fast, config), "rowwise", fast)


@on_two_configs
def test_many_groups_and_no_rows(config):
    for counts in ([1] * 257, [0] * 300, [3, 0] * 600):
        rows, sums = (make(PAIRS["rowwise"], counts, 32, 48) for make in (ByRows, OverRows))
        check_rows(rows, by_rows(rows, torch.float32, config=config), reference.PROMOTION)
        check_sums(sums, over_rows(sums, torch.float32, config=config), "rowwise", fast=False)


def made(format, lines: int, depth: int, seed: int) -> Operand:
    rng = torch.Generator("cuda").manual_seed(seed)
    return reference.quantize(torch.randn(lines, depth, generator=rng, device="cuda"), format, None)[0]


@on_two_configs
@pytest.mark.parametrize("pair", [*RECIPES_PAIRS, "1x128 x 1x128"])
def test_programs_that_make_many_tiles(pair, config):
    """Large enough that each makes several, twice, to the same bits."""
    fits(config, pair)
    counts, cols, depth = [1000, 0, 3000, 77, 2000], 1040, 1168
    a_format, b_format = PAIRS[pair]
    parts = [made(a_format, count, depth, 1) if count else None for count in counts]
    weights = [made(b_format, cols, depth, 10 + group) for group in range(len(counts))]
    rows = rows_on_gpu(rows_of([0, 1000, 1000, 4000, 4077], counts, sum(counts)))
    present = [part for part in parts if part is not None]
    one = a_format.tile.rows == ALL
    scale = [p.scale_inv if p is not None else torch.ones(1, 1, device="cuda") for p in parts]
    a = Operand(
        torch.cat([p.data.view(torch.uint8) for p in present]).view(a_format.dtype),
        torch.cat(scale if one else [p.scale_inv for p in present]),
        a_format,
    )
    codes = torch.stack([w.data.view(torch.uint8) for w in weights]).view(b_format.dtype)
    b = Operand(codes, torch.stack([w.scale_inv for w in weights]), b_format)
    given = a, b, rows, torch.float32, False, config
    found = gemm.triton_by_rows(*given)
    assert torch.equal(found, gemm.triton_by_rows(*given))
    for part, weight, got in zip(parts, weights, found.split(counts), strict=True):
        if part is not None:
            right = reference.gemm_nt(part, weight, torch.float32, False)
            assert (got - right).abs().max() < 2**-9 * right.abs().max()


@on_two_configs
@pytest.mark.parametrize("pair", [*RECIPES_PAIRS, "1x128 x 1x128"])
def test_nan_of_a_group_stays_in_it(pair, config):
    fits(config, pair)
    counts = [130, 200, 300]
    rows, sums = ByRows(PAIRS[pair], counts, 272, 400), OverRows(PAIRS[pair], counts, 272, 400)
    a, b, lie = given_to(rows)
    b.data.view(torch.uint8)[1, 5, 7] = 0x7F
    found = gemm.triton_by_rows(a, b, lie, torch.float32, False, config)
    expected = torch.zeros(lie.total, 272, dtype=torch.bool)
    expected[130:330, 5] = True
    assert torch.equal(found.isnan().cpu(), expected)
    a, b, lie = given_to(sums)
    a.data.view(torch.uint8)[3, int(lie.first[1]) + 199] = 0x7F
    found = gemm.triton_over_rows(a, b, lie, torch.float32, False, config)
    expected = torch.zeros(3, 272, 400, dtype=torch.bool)
    expected[1, 3] = True
    assert torch.equal(found.isnan().cpu(), expected)


def test_rows_past_the_last_group_are_cleared():
    for rows, cols in ((1000, 48), (5, 4096), (3, 8)):
        for last in (0, rows // 2, rows):
            out = torch.full((rows, cols), torch.nan, dtype=torch.bfloat16, device="cuda")
            ends = torch.tensor([0, last], dtype=torch.int32, device="cuda")
            gemm.clear_past(out, ends)
            assert out[:last].isnan().all()
            assert not out[last:].any()


def by_column(a: Operand) -> Operand:
    """With scales as quantizers leave them."""
    return a._replace(scale_inv=a.scale_inv.t().contiguous().t()) if a.format.tile == Tile(1, 128) else a


@pytest.mark.parametrize(
    ("pair", "kind"),
    [(pair, ByRows) for pair in RECIPES_PAIRS]
    + [(pair, OverRows) for pair in ("rowwise", "tensorwise e5m2", "1x128 x 1x128")],
)
def test_launches_that_are_kept_multiply_other_operands(pair, kind, monkeypatch):
    """Of the third and fourth call; launches that are worked out anew make the same bits."""
    monkeypatch.setattr(prepared, "cache", {})
    monkeypatch.setattr(launch, "_seen_once", set())
    product = gemm.triton_by_rows if kind is ByRows else gemm.triton_over_rows
    for seed in range(4):
        a, b, rows = given_to(kind(PAIRS[pair], [130, 0, 119], 272, 400))
        a, b = by_column(a), b if kind is ByRows else by_column(b)
        rng = torch.Generator("cuda").manual_seed(seed)
        for codes in (a.data.view(torch.uint8), b.data.view(torch.uint8)):
            codes ^= 0x80 * torch.randint(0, 2, codes.shape, generator=rng, device="cuda").to(torch.uint8)
        found = product(a, b, rows, torch.float32, False)
        with monkeypatch.context() as anew:
            anew.setattr(prepared, "cache", {})
            assert torch.equal(found, product(a, b, rows, torch.float32, False))
    assert prepared.cache
    assert None not in prepared.cache.values()


def test_nothing_waits_and_a_graph_replays_other_groups():
    case = ByRows(PAIRS["rowwise"], [100, 28], 272, 400)
    a, b, rows = given_to(case)

    def run() -> torch.Tensor:
        return gemm.triton_by_rows(a, b, rows, torch.float32, False)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    rows.first.copy_(torch.tensor([0, 3], dtype=torch.int32))
    rows.ends.copy_(torch.tensor([3, 128], dtype=torch.int32))
    rows.placed.copy_(rows.first)
    graph.replay()
    assert torch.equal(captured, run())
    assert not captured[128 : 128 + TAIL].any()
