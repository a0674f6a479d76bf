"""Our products by groups, interpreted on the CPU, against float64: every pair of scales, any lie of groups."""

from functools import partial

import pytest
import torch

from f8sub import ALL, Float8Format, Operand, Tile
from f8sub.kernels.gemm.tuning import GroupedConfig, Rows, default_grouped_config
from f8sub.kernels.grouped import gemm
from tests.budgets import excess
from tests.data_sets import DTYPES, gaussian, generator
from tests.kernels.grouped import GROUPS, PAIRS, ByRows, OverRows
from tests.kernels.interpreted import interpreted, needs_triton
from tests.kernels.products import E4M3, MX, ROW
from tests.selection import long_but

SHAPES = {"whole": (128, 256), "ragged": (80, 144)}
"""N and K that tiles divide, and that they do not."""

CASES = [(pair, "ragged") for pair in PAIRS]
CASES += [(pair, lie) for pair in ("rowwise", "1x128 x 128x128") for lie in GROUPS if lie != "ragged"]
on_each_pair_and_lie = pytest.mark.parametrize(("pair", "lie"), long_but(CASES[::2], CASES))
"""Scales do not matter to where groups lie, but for whether they are of rows or of blocks."""


def ran(launches: list, out: torch.Tensor) -> torch.Tensor:
    """All launches, over a result and a table that hold what must not be left there."""
    out.view(torch.uint8).fill_(0x7F)
    launches[0].arguments["table_ptr"].fill_(1 << 20)
    for launch in launches:
        launch.run()
    return out


def config(**changes: int) -> GroupedConfig:
    return GroupedConfig(**{"rows": 64, "cols": 64, "stages": 3, "group": 2, **changes})


def by_rows(case: ByRows, dtype: torch.dtype, fast: bool = False, **changes: int) -> torch.Tensor:
    from f8sub.kernels.triton.gemm_launch import product_by_rows

    return ran(*product_by_rows(*case.operands(), dtype, fast, config(**changes), 5))


def over_rows(case: OverRows, dtype: torch.dtype, fast: bool = False, **changes: int) -> torch.Tensor:
    from f8sub.kernels.triton.gemm_launch import product_over_rows

    return ran(*product_over_rows(*case.operands(), dtype, fast, config(**changes), 5))


def check_rows(pair: str, counts: list[int], shape: tuple[int, int], dtype=torch.float32, **how) -> None:
    case = ByRows(PAIRS[pair], counts, *shape)
    *found, past = case.split(by_rows(case, dtype, **how))
    assert not past.any()
    for part, right in zip(found, case.groups_right(), strict=True):
        assert excess(part, right) <= 1


def check_sums(pair: str, counts: list[int], shape: tuple[int, int], dtype=torch.float32, **how) -> None:
    case = OverRows(PAIRS[pair], counts, *shape)
    found = over_rows(case, dtype, **how)
    assert found.shape == (len(counts), *shape)
    for part, right in zip(found, case.groups_right(), strict=True):
        assert excess(part, right) <= 1 if right is not None else not part.any()


@on_each_pair_and_lie
def test_rows_by_the_matrix_of_their_group(interpreter, pair, lie):
    interpreter(check_rows, pair, GROUPS[lie], SHAPES["ragged"])


@on_each_pair_and_lie
def test_sums_over_the_rows_of_each_group(interpreter, pair, lie):
    interpreter(check_sums, pair, GROUPS[lie], SHAPES["ragged"])


CHANGES = [
    {"rows": 128, "cols": 128},
    {"rows": 16, "cols": 128, "group": 8},
    {"rows": 128, "cols": 32, "group": 1},
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "x".join(map(str, changes.values())))
@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], DTYPES.values()), ids=list(DTYPES))
def test_tiles_and_dtypes(interpreter, dtype, changes):
    for check in (check_rows, check_sums):
        interpreter(partial(check, **changes), "1x128 x 128x128", GROUPS["ragged"], SHAPES["ragged"], dtype)


@pytest.mark.parametrize("pair", ["rowwise", "tensorwise e5m2", "1x128 x 128x128"])
def test_fast_accumulation(interpreter, pair):
    """Where scales are of blocks it has no effect."""
    for check in (check_rows, check_sums):
        interpreter(partial(check, fast=True), pair, GROUPS["ragged"], SHAPES["whole"])


@interpreted
def test_a_matrix_is_added_to_rounded_sums():
    """As PyTorch adds two gradients in bfloat16: rows past the last group stay zero, for the matrix has zeros there."""
    from f8sub.kernels.triton.gemm_launch import product_by_rows

    for pair in ("tensorwise e5m2", "1x128 x 128x128"):
        case = ByRows(PAIRS[pair], GROUPS["ragged"], *SHAPES["ragged"])
        operands, how = case.operands(), (torch.bfloat16, False, config(), 5)
        plain = ran(*product_by_rows(*operands, *how)).clone()
        added = gaussian(tuple(plain.shape), generator(8)).bfloat16()
        added[sum(case.counts) :] = 0
        assert torch.equal(ran(*product_by_rows(*operands, *how, added)), plain + added)


MANY = {"257": [1] * 257, "300 empty": [0] * 300, "20 empty": [3, 0] * 20}


@pytest.mark.parametrize("counts", long_but([MANY["20 empty"]], MANY.values()), ids=list(MANY))
def test_many_groups(interpreter, counts):
    for check in (check_rows, check_sums):
        interpreter(partial(check, rows=16), "rowwise", counts, (32, 48))


@interpreted
def test_a_wrong_scale_exceeds_the_budget():
    """What makes the budget mean something: a scale that is off by 2**-7."""
    case = ByRows(PAIRS["1x128 x 128x128"], GROUPS["ragged"], *SHAPES["ragged"])
    found = case.split(by_rows(case, torch.float32))
    case.weights[3].scale_inv[0, 1] *= 1 + 2.0**-7
    assert excess(found[3], case.groups_right()[3]) > 1
    assert excess(found[0], case.groups_right()[0]) <= 1


def multiplied_rows(a: Operand, b: Operand, rows) -> torch.Tensor:
    from f8sub.kernels.triton.gemm_launch import product_by_rows

    return ran(*product_by_rows(a, b, rows, torch.float32, False, config(), 5))


@interpreted
def test_nan_stays_in_its_group():
    counts = GROUPS["ragged"]
    rows = ByRows(PAIRS["1x128 x 1x128"], counts, *SHAPES["ragged"])
    for group, end in ((0, 37), (3, 168)):
        a, b, lie = rows.operands()
        b.data.view(torch.uint8)[group, 5, 7] = 0x7F
        found = multiplied_rows(a, b, lie)
        expected = torch.zeros(found.shape, dtype=torch.bool)
        expected[end - counts[group] : end, 5] = True
        assert torch.equal(found.isnan(), expected)


@interpreted
def test_ends_that_lie_outside_of_the_rows():
    """They are the user's error; nothing is written past the result."""
    case = ByRows(PAIRS["rowwise"], [30, 40], *SHAPES["ragged"])
    a, b, rows = case.operands()
    found = multiplied_rows(a, b, rows._replace(ends=torch.tensor([30, 1 << 20], dtype=torch.int32)))
    for part, right in zip(case.split(found)[:2], case.groups_right(), strict=True):
        assert excess(part, right) <= 1


@interpreted
def test_groups_are_made_longest_first():
    from f8sub.kernels.triton.gemm_launch import product_over_rows

    counts = [5, 0, 700, 130, 300, 6]
    launches, out = product_over_rows(
        *OverRows(PAIRS["rowwise"], counts, 16, 16).operands(), torch.float32, False, config(), 5
    )
    ran(launches, out)
    table = launches[0].arguments["table_ptr"].view(-1, 4)
    assert table[:, 0].tolist() == [2, 4, 3, 0, 5, 1]
    assert table[:, 1].tolist() == [1, 9, 7, 0, 12, 1]
    assert table[:, 2].tolist() == [6, 3, 2, 1, 1, 0]


def rows_are_cleared() -> None:
    from f8sub.kernels.triton.gemm_launch import clearing

    for last in (0, 3, 5):
        out = torch.full((5, 2100), torch.nan)
        clearing(out, torch.tensor([0, last], dtype=torch.int32), 3).run()
        assert out[:last].isnan().all()
        assert not out[last:].any()


def test_rows_past_the_last_group_are_cleared(interpreter):
    interpreter(rows_are_cleared)
    out = torch.full((5, 16), torch.nan)
    assert not gemm.clear_past(out, torch.tensor([0, 2]))[2:].any()
    assert out[:2].isnan().all()


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ((ROW, Float8Format(E4M3, Tile(64, 64))), "not 64x64"),
        ((Float8Format(E4M3, Tile(ALL, 128)), ROW), "not allx128"),
        ((MX, MX), "float32 scales of one level"),
        ((ROW, ROW), "runs on NVIDIA's GPUs, not on cpu"),
    ],
)
def test_what_is_not_multiplied(pair, reason):
    assert reason in str(gemm.why_not_triton(*pair, torch.device("cpu")))


@needs_triton
def test_without_groups_or_rows_there_are_zeros():
    codes = torch.empty(0, 32, dtype=E4M3)
    none = torch.zeros(2, dtype=torch.int32)
    a = Operand(codes, torch.empty(0, 1), ROW)
    b = Operand(torch.zeros(2, 16, 32).to(E4M3), torch.ones(2, 16, 1), ROW)
    assert gemm.triton_by_rows(a, b, Rows(none, none, none, 0), torch.bfloat16, False).shape == (0, 16)
    a, b = (Operand(torch.empty(lines, 0, dtype=E4M3), torch.ones(2, lines), ROW) for lines in (16, 32))
    found = gemm.triton_over_rows(a, b, Rows(none, none, none, 0), torch.bfloat16, False)
    assert found.shape == (2, 16, 32)
    assert not found.any()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"rows": 128, "cols": 256, "stages": 4, "persistent": True, "blocks": 3}, "passes of its stages"),
        ({"rows": 64, "cols": 256, "stages": 4, "persistent": True}, "tiles of 128x256"),
        ({"rows": 64, "cols": 256, "stages": 4}, "at most 128x128"),
        ({"rows": 64, "cols": 64, "stages": 4, "blocks": 2}, "one block of K at a time"),
    ],
)
def test_tiles_that_the_kernels_do_not_make(sizes, words):
    with pytest.raises(ValueError, match=words):
        GroupedConfig(**sizes)


def test_passes_waste_no_blocks():
    """Of K in whole passes; two blocks at most where the GPU alone knows."""
    assert [default_grouped_config(depth, by_block=False).blocks for depth in (4, 6, 23, 24, 57, 1)] == [
        4,
        2,
        4,
        4,
        2,
        2,
    ]
    assert default_grouped_config(None, by_block=False).blocks == 2
    assert default_grouped_config(8, by_block=True).blocks == 1


@needs_triton
@pytest.mark.parametrize("pair", PAIRS)
def test_descriptors_of_the_persistent_kernel(pair):
    """What they refuse on the host: lines that begin elsewhere than at multiples of 16 bytes.

    Scales of rows by groups have none: groups begin anywhere.
    """
    from f8sub.kernels.triton.gemm_launch import product_by_rows, product_over_rows

    tiles = GroupedConfig(128, 256, 4, persistent=True, blocks=1)
    for make, product in ((ByRows, product_by_rows), (OverRows, product_over_rows)):
        case = make(PAIRS[pair], GROUPS["ragged"], *SHAPES["ragged"])
        launches, _ = product(*case.operands(), torch.bfloat16, False, tiles, 132)
        arguments = launches[1].arguments
        assert arguments["a"].block_shape == [128, 128]
        assert arguments["b"].block_shape == [256, 128]
        for side in "AB":
            if make is ByRows and side == "A":
                assert isinstance(arguments["a_scale"], torch.Tensor)
            elif arguments[side].edge == 1:
                assert arguments[f"{side.lower()}_scale"].block_shape == [1, {"A": 128, "B": 256}[side]]
