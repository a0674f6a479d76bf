"""Triton's quantizers of groups of rows, interpreted on the CPU, equal the reference bitwise."""

import random

import pytest
import torch

from f8sub import Float8Format, ScaleRule, Tile
from f8sub.kernels import cuda
from f8sub.kernels.grouped import operands
from f8sub.kernels.grouped.operands import Groups
from tests.data_sets import DATA_SETS, edge_values, make
from tests.kernels.interpreted import interpreted, launched
from tests.kernels.products import assert_same_bytes
from tests.kernels.quantized import E4M3, FORMATS, INF, NAN
from tests.selection import long_but

GROUP_FORMATS = {**FORMATS, "1x32-e8m0": Float8Format(E4M3, Tile(1, 32), ScaleRule.E8M0)}
TAIL = 7
"""Rows of no group, which hold NaN."""
COUNTS = {
    "ragged": [37, 1, 0, 130, 16],
    "even": [64, 64],
    "first, middle and last empty": [0, 5, 0, 0, 300, 0],
    "all empty": [0, 0],
    "one": [33],
    "one token": [1],
    "257": [1, 0, 0, 2] * 64 + [2],
}
WIDTHS = {"both": 144, "row": 256, "column": 256}
"""Columns by usages: not of whole tiles, and of whole ones."""
MANY = 100
"""More groups than that are cast once, and few columns of them: the interpreter runs one program after the other."""
USAGES = {"both": (True, True), "row": (True, False), "column": (False, True)}

WALKS = ("tensorwise", "rowwise", "1x128", "128x128", "256x256-e5m2", "1x32-e8m0")
"""What depends on how a kernel walks: the other formats are walked through alike."""


def groups_of(counts: list[int], tail: int = TAIL) -> Groups:
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0).int()
    return Groups.of(ends, sum(counts) + tail)


def on(device: str, groups: Groups) -> Groups:
    return Groups(groups.first.to(device), groups.ends.to(device), groups.rows)


def spoiled(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """NaN in the rows of no group."""
    x[int(groups.ends[-1]) :] = NAN
    return x


def check(x, groups: Groups, format: Float8Format, usages="both", multiple=16, device="cpu") -> None:
    """Rows past the last group are undefined in what has x's rows."""
    row, col = (format if is_made else None for is_made in USAGES[usages])
    found = cuda.quantize_tokens(x.to(device), on(device, groups), row, col, multiple)
    for codes, wanted, contracted in zip(found, (row, col), (False, True), strict=True):
        if wanted is None:
            assert codes is None
            continue
        starts = {"contracted": contracted, "multiple": multiple if contracted else 1}
        right = operands.quantize_tokens(x, groups, format, **starts)
        assert codes.groups.rows == right.groups.rows
        assert codes.groups.first.tolist() == right.groups.first.tolist()
        assert codes.groups.ends.tolist() == right.groups.ends.tolist()
        data, scale_inv = (codes.data, right.data), (codes.scale_inv, right.scale_inv)
        if not contracted and right.groups is groups:
            end = int(groups.ends[-1])
            data = data[0][:end], data[1][:end]
            if format.tile.rows == 1:
                scale_inv = scale_inv[0][:end], scale_inv[1][:end]
        assert_same_bytes("codes", *data)
        assert_same_bytes("scales", *scale_inv)


EMPTY = "first, middle and last empty"
SHORT = [("rowwise", "ragged"), ("128x128", "ragged"), ("1x128", EMPTY), ("tensorwise", "all empty")]
MORE = [(name, kind) for name in WALKS for kind in ("ragged", EMPTY, "all empty", "one token")]
MORE += [("rowwise", kind) for kind in COUNTS]


@pytest.mark.parametrize(("name", "kind"), long_but(SHORT, dict.fromkeys(SHORT + MORE)))
@interpreted
def test_groups_of_any_size(name, kind, device):
    groups, format = groups_of(COUNTS[kind]), GROUP_FORMATS[name]
    widths = {"both": 32} if len(COUNTS[kind]) > MANY else WIDTHS
    for usages, cols in widths.items():
        x = spoiled(make("lognormal", (groups.rows, cols), 5, torch.bfloat16), groups)
        check(x, groups, format, usages, device=device)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
@interpreted
def test_groups_begin_at_multiples(name, device):
    groups = groups_of(COUNTS["ragged"])
    x = spoiled(make("lognormal", (groups.rows, 144), 5, torch.bfloat16), groups)
    for multiple in (32, 128):
        check(x, groups, GROUP_FORMATS[name], multiple=multiple, device=device)


BF16 = [(name, torch.bfloat16) for name in GROUP_FORMATS]
OTHERS = [("rowwise", torch.float32), ("128x128", torch.float32), ("tensorwise", torch.float16)]
SHORTLY = [case for case in BF16 if case[0] in ("rowwise", "1x32-e8m0")]
on_each_format_and_dtype = pytest.mark.parametrize(("name", "dtype"), long_but(SHORTLY, BF16 + OTHERS))


@on_each_format_and_dtype
@interpreted
def test_data_sets_edge_values_and_elements_that_are_not_finite(name, dtype, device):
    """Every data set, edge values, and elements that are not finite, one group of which has no others."""
    format, groups = GROUP_FORMATS[name], groups_of([20, 0, 28], 2)
    data = [make(data, (50, 80), 3, dtype) for data in DATA_SETS]
    bad = make("gaussian", (50, 80), 2, dtype)
    bad[3, 4], bad[7, 9], bad[19, 0] = NAN, INF, -INF
    none = torch.full_like(bad, NAN)
    none[3], none[30, 3] = INF, 1.0
    for x in (*data, bad, none):
        check(spoiled(x, groups), groups, format, device=device)
    small = groups_of([7, 9], 0)
    for x in edge_values(dtype).values():
        check(x, small, format, device=device)


IN_TURN = ("tensorwise", "rowwise", "tensorwise-e5m2", "rowwise-e5m2")
LONG_IN_TURN = [("tensorwise", EMPTY), ("tensorwise-e5m2", "one"), ("rowwise-e5m2", "all empty")]
LONG_IN_TURN += [(name, kind) for name in IN_TURN[2:] for kind in ("even", "one token")]
LONG_IN_TURN += [("tensorwise", "ragged"), ("rowwise", EMPTY)]


@pytest.mark.parametrize(("name", "kind"), [("rowwise", "ragged"), *long_but([], LONG_IN_TURN)])
@interpreted
def test_amaxes_of_some_groups_are_found_while_others_are_cast(name, kind, device):
    """Groups, and experts' weights, whose amaxes are found while those before them are cast: the same bits."""
    from unittest import mock

    from f8sub.kernels import cuda
    from f8sub.kernels.grouped import operands
    from f8sub.kernels.triton import prepared, quantize_grouped_launch

    format, groups = GROUP_FORMATS[name], groups_of(COUNTS[kind])
    for ahead in (1, 3 * 128 * 256 * 2, 2**30):
        with (
            mock.patch.multiple(quantize_grouped_launch, LEAST_BYTES=0, AHEAD_BYTES=ahead),
            mock.patch.multiple(quantize_grouped_launch, LEAST_BYTES=0, AHEAD_BYTES=ahead),
            mock.patch.dict(prepared.cache, clear=True),
            launched() as names,
        ):
            for usages in ("both", "column"):
                x = spoiled(make("lognormal", (groups.rows, 256), 5, torch.bfloat16), groups)
                x[0, 3] = INF
                names.clear()
                check(x, groups, format, usages, 128, device)
                whole = format.tile.is_whole
                kernel = "quantize_groups_one_pass" if whole else "quantize_group_lines_one_pass"
                assert names == ["lay_out", kernel]
            if format.tile.is_whole:
                w = make("lognormal", (5, 144, 80), 6, torch.bfloat16)
                w[1], w[2, 3, 4] = 0, NAN
                found, right = (
                    cuda.quantize_experts(w.to(device), format),
                    operands.quantize_weights(w, format),
                )
                assert_same_bytes("codes", found.data, right.data.contiguous())
                assert_same_bytes("scales", found.scale_inv, right.scale_inv.contiguous())
                assert names[-1] == "quantize_experts_one_pass"


@pytest.mark.parametrize("ahead", [0, 1, 5, 1000])
@interpreted
def test_who_casts_waits_only_for_turns_before_its_own(ahead, device):
    """Every strip is read once and cast once, after all of its group were read; and a turn knows where its strip is."""
    from unittest import mock

    from f8sub.kernels.triton import quantize_grouped_launch

    rng, edge = random.Random(ahead), 128
    for _ in range(6):
        counts = [rng.choice((0, 1, 127, 128, 129, rng.randrange(900))) for _ in range(rng.randrange(1, 9))]
        groups, format = groups_of(counts), GROUP_FORMATS["tensorwise"]
        x = torch.empty(groups.rows, edge, dtype=torch.bfloat16, device=device)
        limits = {"LEAST_BYTES": 0, "AHEAD_BYTES": ahead * edge * edge * 2}
        with mock.patch.multiple(quantize_grouped_launch, **limits):
            made = cuda.token_launches(x, groups.ends.to(device), format, format, edge)
        made.results[-1].fill_(-1)
        made.launches[0].run()
        given = made.launches[0].arguments
        strips = [(group, row) for group, count in enumerate(counts) for row in range(0, count, edge)]
        last = given["TURNS"]
        turns = given["turns_ptr"].view(-1, 8)[: 2 * last].tolist()
        assert sorted(turn[0] for turn in turns) == list(range(2 * last))
        place = {turn[0]: number for number, turn in enumerate(turns)}
        for turn, line, stop, group, first, count, *_ in turns:
            strip = turn // 2
            if strip >= len(strips):
                assert (group, stop, first, count) == (len(counts), 0, strip, 1)
                continue
            begin = sum(counts[:group])
            of_group = [number for number, (other, _) in enumerate(strips) if other == group]
            assert (group, line, stop) == (strips[strip][0], begin + strips[strip][1], begin + counts[group])
            assert (first, count) == (of_group[0], len(of_group))
            assert place[2 * strip + 1] > max(place[2 * other] for other in of_group)
        assert given["zeros_ptr"].numel() == given["ZEROS"] > 0
        assert not given["zeros_ptr"].any()


@pytest.mark.parametrize(("dtype", "cols"), [(torch.float16, 256), (torch.bfloat16, 144)])
@interpreted
def test_matrices_without_tiles_of_pairs_take_two_launches(dtype, cols, device):
    from unittest import mock

    from f8sub.kernels.triton import prepared, quantize_grouped_launch

    groups = groups_of(COUNTS["ragged"])
    with (
        mock.patch.object(quantize_grouped_launch, "LEAST_BYTES", 0),
        mock.patch.dict(prepared.cache, clear=True),
        launched() as names,
    ):
        x = spoiled(make("lognormal", (groups.rows, cols), 5, dtype), groups)
        check(x, groups, GROUP_FORMATS["tensorwise"], "both", 128, device)
    assert names == ["lay_out", "amax_of_groups", "cast_groups_with_one"]
