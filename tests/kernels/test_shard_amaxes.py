"""Amaxes of many matrices in one launch, and their scales in another, interpreted: bitwise the specification's."""

import pytest
import torch

from f8sub import ALL, Float8Format, ScaleRule, Tile
from f8sub.formats import E2M1
from f8sub.kernels.scales import PriorScale, scales_or_nan, shard_amax
from f8sub.kernels.triton import multi_tensor_launch, support
from f8sub.kernels.triton.multi_tensor_launch import ShardInTable
from tests.data_sets import edge_values, generator, make
from tests.kernels.interpreted import interpreted

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WHOLE, ROW, SQUARE, LARGE = Tile(ALL, ALL), Tile(1, ALL), Tile(128, 128), Tile(256, 256)
OBLONG, STACK = Tile(128, 256), Tile(24, ALL)
PLACES = [
    (WHOLE, (300, 272), (0, 0)),
    (WHOLE, (1, 5), (7, 0)),
    (WHOLE, (130, 160), (0, 32)),
    (ROW, (40, 272), (33, 0)),
    (ROW, (1, 20000), (0, 0)),
    (ROW, (3, 33), (5, 66)),
    (SQUARE, (256, 128), (0, 0)),
    (SQUARE, (130, 150), (128, 0)),
    (SQUARE, (33, 272), (100, 0)),
    (SQUARE, (300, 48), (0, 112)),
    (LARGE, (300, 272), (40, 0)),
    (LARGE, (2, 3), (255, 255)),
    (OBLONG, (140, 272), (120, 0)),
    (STACK, (72, 48), (24, 0)),
    (ROW, (2, 16), (0, 0)),
    (STACK, (50, 33), (40, 0)),
    (STACK, (7, 20000), (0, 0)),
]
"""Tile, shape and offset of parts: in tiles that begin elsewhere, of lines that are no multiple of 16 bytes."""


def many_matrices(seed: int, device: str) -> tuple[list[ShardInTable], list[torch.Tensor], torch.Tensor]:
    """Parts of two dtypes each, side by side in one table; some are views of wider ones, some hold NaN or infinity."""
    matrices, expected, entry = [], [], 0
    for number, (tile, shape, offset) in enumerate(PLACES):
        for kind in (0, 1):
            dtype = DTYPES[(number + kind + seed) % 3]
            data = make(("gaussian", "lognormal", "zeros")[(number + kind + seed) % 3], shape, number, dtype)
            if (bad := (None, None, "nan", "inf", "-inf")[(number + kind + seed) % 5]) is not None:
                data[shape[0] // 2, shape[1] // 3] = float(bad)
            amaxes = shard_amax(data, tile, offset)
            data = data.to(device)
            if number % 3 == 2:
                data = torch.nn.functional.pad(data, (0, 16), value=float("nan"))[:, : shape[1]]
            # As in the table of a whole matrix, a column of tiles more than the part touches.
            columns = amaxes.shape[1] + (tile.cols != ALL)
            matrices.append(ShardInTable(data, tile, offset, entry, columns))
            rows = torch.zeros(amaxes.shape[0], columns)
            rows[:, : amaxes.shape[1]] = amaxes
            expected.append(rows.flatten())
            entry += rows.numel() + 1
            expected.append(torch.zeros(1))
    return matrices, expected, torch.zeros(entry, device=device)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.long) for seed in (0, 1)])
@interpreted
def test_amaxes_of_all_tiles_and_dtypes(seed, device):
    """Twice by the same launches, which read what there is when they run."""
    matrices, expected, table = many_matrices(seed, device)
    assert all(multi_tensor_launch.takes(matrix, table.device) for matrix in matrices)
    launches = multi_tensor_launch.amaxes(matrices, table)
    assert [launch.arguments["ALIGNED"] for launch in launches] == [True, False]
    there = 2.0**-10
    table.fill_(there)
    for launch in launches:
        launch.run()
    assert torch.equal(table.cpu(), torch.cat(expected).clamp(min=there))
    for matrix in matrices:
        matrix.data.fill_(-0.25)
    table.zero_()
    for launch in launches:
        launch.run()
    assert set(table.cpu().unique().tolist()) == {0.0, 0.25}


@interpreted
def test_amaxes_of_edge_values(device):
    """Subnormal values and the largest of each dtype."""
    for dtype in DTYPES:
        for data in edge_values(dtype).values():
            table = torch.zeros(len(data), device=device)
            (launch,) = multi_tensor_launch.amaxes(
                [ShardInTable(data.to(device).contiguous(), ROW, (0, 0), 0, 1)], table
            )
            launch.run()
            assert torch.equal(table.cpu()[:, None], shard_amax(data, ROW, (0, 0)))


FORMATS = [
    Float8Format(E4M3, WHOLE),
    Float8Format(E5M2, WHOLE, ScaleRule.POWER_OF_2),
    Float8Format(E4M3, ROW, ScaleRule.POWER_OF_2),
]


def table_of_amaxes() -> torch.Tensor:
    """More than one program's: every exponent, infinity, 0, what bfloat16 and float16 round to infinity."""
    drawn = torch.randint(0, 1 << 23, (5, 255), generator=generator(4), dtype=torch.int32)
    bits = (torch.arange(255, dtype=torch.int32) << 23) | drawn
    largest = torch.finfo(torch.float32).max
    special = torch.tensor([0.0, float("inf"), largest, largest / 2, 65504.0, 65519.0, 65520.0, 2.0**-149])
    return torch.cat([bits.flatten().view(torch.float32), special])


@interpreted
def test_scales_of_many_amaxes(device):
    amax = table_of_amaxes()
    mantissas = torch.rand(amax.shape, generator=generator(5)) + 1.0
    past = torch.ldexp(mantissas, torch.arange(len(amax)) % 200 - 100)
    past[::3] = 0.0
    for format in FORMATS:
        for through in DTYPES:
            for before in (None, PriorScale(past, 0.0, covers=True), PriorScale(past, 2.0, covers=True)):
                right = scales_or_nan(amax.to(through).float(), format, before)
                found = [torch.full(amax.shape, 7.0, device=device) for _ in range(2)]
                given = before and before._replace(scale=before.scale.to(device))
                assert multi_tensor_launch.takes_amaxes(found[0], format, through)
                multi_tensor_launch.scales(amax.to(device), given, *found, format, through).run()
                for ours, expected in zip(found, (right.scale, right.scale_inv), strict=True):
                    torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@interpreted
def test_what_no_launch_takes():
    data, device = torch.zeros(64, 128), torch.device("cpu")
    others = [(data, Tile(*edges)) for edges in ((1, 32), (32, 32), (ALL, 1))]
    others.append((data[:, :64], STACK))
    others += [(matrix, WHOLE) for matrix in (data.t(), data.double(), data[:0])]
    for matrix, tile in others:
        assert not multi_tensor_launch.takes(ShardInTable(matrix, tile, (0, 0), 0, 4), device)
    assert not multi_tensor_launch.takes(ShardInTable(data, WHOLE, (0, 0), 0, 1), torch.device("meta"))
    for format in (Float8Format(E4M3, WHOLE, ScaleRule.E8M0), Float8Format(E2M1, WHOLE)):
        assert not multi_tensor_launch.takes_amaxes(torch.zeros(4), format, torch.bfloat16)
    assert not multi_tensor_launch.takes_amaxes(torch.zeros(4), FORMATS[0], torch.float64)


def test_the_cpu_has_none():
    data = torch.zeros(64, 128)
    assert not support.takes(data)
    assert not multi_tensor_launch.takes(ShardInTable(data, WHOLE, (0, 0), 0, 1), data.device)
    assert not multi_tensor_launch.takes_amaxes(data, FORMATS[0], torch.float32)
    assert multi_tensor_launch.amaxes([], data) == []
