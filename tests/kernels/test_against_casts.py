"""Codes and scales, bit for bit: against torchao's own casts, and against numbers worked out by hand.

Where f8sub differs on purpose, the test says so: an all-zero tile has scale 1 and no scale is above 2**126, where
torchao's smallest amax is 1e-12; non-finite elements stay NaN in place and take no part in their tile's scale, where
they decide it in torchao.
"""

import pytest
import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from f8sub import ALL, Float8Format, Operand, ScaleRule, Tile
from f8sub.formats import E2M1
from f8sub.kernels import reference
from tests.data_sets import gaussian, generator, lognormal, spread_columns

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF, NAN = float("inf"), float("nan")
LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127
SHAPE = (256, 512)


def wide(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Blocks of 128 from about 1e-11 to 1e11: neither torchao's smallest amax nor ours is met."""
    columns = torch.linspace(-24, 24, shape[1] // 128).repeat_interleave(128)
    return gaussian(shape, rng) * torch.exp(columns)


DATA = {
    "gaussian": gaussian,
    "lognormal": lognormal,
    "wide": wide,
    "spread columns": lambda shape, rng: spread_columns(gaussian(shape, rng)),
    "a zero row": lambda shape, rng: torch.cat(
        [torch.zeros(1, shape[1]), gaussian((shape[0] - 1, shape[1]), rng)]
    ),
}
on_each_data_set = pytest.mark.parametrize("data", DATA, ids=list(DATA))
on_each_dtype = pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
on_both_float8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
RULES = {"float": ScaleRule.FLOAT, "power-of-2": ScaleRule.POWER_OF_2}
on_each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))


def draw(data: str, source: torch.dtype) -> torch.Tensor:
    return DATA[data](SHAPE, generator(21)).to(source)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def rowwise(x: torch.Tensor, format: Float8Format) -> Operand:
    return reference.quantize(x, format, None)[0]


def in_tiles(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """One row a tile, in row-major order of the tiles: (tiles, elements of one)."""
    height, width = (
        size if edge == ALL else edge for edge, size in zip((tile.rows, tile.cols), x.shape, strict=True)
    )
    return x.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(0, 1).flatten(1)


@on_each_rule
@on_both_float8
@on_each_dtype
@on_each_data_set
@pytest.mark.parametrize(
    "tile", [Tile(ALL, ALL), Tile(1, ALL), Tile(1, 128), Tile(128, 128), Tile(256, 256)], ids=str
)
def test_torchao_casts_each_tile_to_the_same_codes(tile, data, source, dtype, rule):
    """torchao's axiswise cast of a matrix whose rows are the tiles; its scales multiply, as ours do not."""
    x = draw(data, source)
    ours = rowwise(x, Float8Format(dtype, tile, rule))
    theirs = hp_tensor_to_float8_dynamic(
        in_tiles(x, tile).contiguous(),
        dtype,
        LinearMMConfig(),
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
        round_scales_to_power_of_2=rule is ScaleRule.POWER_OF_2,
    )
    not_zero = in_tiles(x, tile).abs().amax(1) > 0
    assert torch.equal(bits(in_tiles(ours.data, tile)), bits(theirs._data))
    assert torch.equal(ours.scale_inv.flatten()[not_zero], theirs._scale.flatten().reciprocal()[not_zero])
    assert (ours.scale_inv.flatten()[~not_zero] == 1).all()


@on_both_float8
@on_each_dtype
@on_each_data_set
def test_torchaos_mx_cast(data, source, dtype):
    """Scales rounded up (RCEIL). torchao gives a zero tile the smallest scale there is; ours is 1."""
    x = draw(data, source)
    ours = rowwise(x, Float8Format(dtype, Tile(1, 32), ScaleRule.E8M0))
    scale_inv, codes = to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
    zero = in_tiles(x, Tile(1, 32)).abs().amax(1).view(scale_inv.shape) == 0
    assert torch.equal(bits(ours.data), bits(codes))
    assert torch.equal(bits(ours.scale_inv)[~zero], bits(scale_inv)[~zero])
    assert (bits(ours.scale_inv)[zero] == 127).all()


NEXT_ABOVE_448 = 448 + 2.0**-15
E4M3_ROWS = {
    # x; scale_inv of the two rules; codes of any float32; codes of powers of two, None where they are the same
    "zeros": ([0.0, -0.0], 1.0, 1.0, [0x00, 0x80], None),
    "ties and ends": (
        [448, 1, -1.0625, 1.1875, 2**-6, 2**-9, 2**-10, 3 * 2**-10, 7.5 * 2**-9, -(2**-9)],
        1.0,
        1.0,
        [0x7E, 0x38, 0xB8, 0x3A, 0x08, 0x01, 0x00, 0x02, 0x08, 0x81],
        None,
    ),
    "amax a power of two": ([256.0, 1.0], 1 / 1.75, 1.0, [0x7E, 0x3E], [0x78, 0x38]),
    "amax the next one": ([512.0, 2.0], 2 / 1.75, 2.0, [0x7E, 0x3E], [0x78, 0x38]),
    "amax just above 448": ([NEXT_ABOVE_448, 1.0], 1 + 2.0**-23, 2.0, [0x7E, 0x38], [0x76, 0x30]),
    "amax 448 * 2**-20": ([448 * 2.0**-20], 2.0**-20, 2.0**-20, [0x7E], None),
    "infinity and NaN": ([1.0, INF, -INF, NAN], 1 / 448, 2.0**-8, [0x7E, -1, -1, -1], [0x78, -1, -1, -1]),
    "nothing finite": ([NAN, INF], 1.0, 1.0, [-1, -1], None),
    "the smallest float32": ([2.0**-149], 2.0**-126, 2.0**-126, [0x00], None),
    "the last amax at the cap": ([2.0**-118, 2.0**-127], 2.0**-126, 2.0**-126, [0x78, 0x30], None),
    "the first amax below the cap": ([2.0**-117], 2.0**-125 / 1.75, 2.0**-125, [0x7E], [0x78]),
    "the largest float32": ([LARGEST_FLOAT32], 9586980 * 2.0**96, 2.0**120, [0x7E], [0x78]),
}


@pytest.mark.parametrize(
    ("x", "float_inv", "power_inv", "float_codes", "power_codes"), E4M3_ROWS.values(), ids=list(E4M3_ROWS)
)
def test_edge_values(x, float_inv, power_inv, float_codes, power_codes):
    """One tile of a few elements; e4m3 has 448 = 1.75 * 2**8 as its largest value.

    - Codes: e4m3 is sign, 4 bits of exponent + 7, 3 of mantissa, so 1 is 0x38, 448 is 0x7E, 2**-6 is 0x08 and the
      smallest subnormal 2**-9 is 0x01. "ties and ends" has scale 1 and values in the middle of two codes, which go to
      the even one: 1.0625 to 1 (0x38), 1.1875 to 1.25 (0x3A).
    - amax 256 gives 448 / 256 = 1.75, as a power of two 1; amax 512 gives 0.875, as a power of two 0.5.
    - One step above 448, 448 / (448 + 2**-15) = 1 - 1.22 * 2**-24 is 1 - 2**-24 in float32 and 0.5 as a power of two.
      The inverse of 1 - 2**-24 is a little more than 1 + 2**-24, so it rounds to 1 + 2**-23.
    - NaN and infinity are NaN in place (-1 here) and take no part in amax; a tile of nothing else has scale 1.
    - Scales stop at 2**126, so 448 / 2**-118 = 1.75 * 2**126 is 2**126 and 2**-118 becomes 2**8, which is 0x78.
      2**-149 * 2**126 is 2**-23: zero.
    - The scale of the largest float32 is 1.75 * 2**-120 / (1 - 2**-24), in float32 (1.75 + 2**-23) * 2**-120, the
      inverse of which is 9586980 * 2**96; its code is the largest. With 2**-120 it is 2**8 less a trifle: 0x78.
    """
    power_codes = float_codes if power_codes is None else power_codes
    for rule, scale_inv, codes in (
        (ScaleRule.FLOAT, float_inv, float_codes),
        (ScaleRule.POWER_OF_2, power_inv, power_codes),
        (ScaleRule.E8M0, power_inv, power_codes),
    ):
        tile = Tile(1, 32) if rule is ScaleRule.E8M0 else Tile(1, ALL)
        operand = rowwise(torch.tensor([x]), Float8Format(E4M3, tile, rule))
        assert operand.scale_inv.float().flatten().tolist() == [torch.tensor(scale_inv).item()]
        found = bits(operand.data).flatten().tolist()
        assert [-1 if code in (0x7F, 0xFF) else code for code in found] == codes
    # Of e8m0, the inverse scale 2**k is the byte k + 127, so the cap is the byte 1, not 0.
    assert bits(operand.scale_inv).item() == torch.tensor(power_inv).frexp().exponent.item() - 1 + 127


def two_levels(*tiles: list[float]) -> tuple[float, list[int], list[list[int]]]:
    """global_scale_inv, the e4m3 codes of the block scales, and the e2m1 codes, of tiles filled up with zeros."""
    x = torch.zeros(1, 16 * len(tiles))
    for position, values in enumerate(tiles):
        x[0, 16 * position : 16 * position + len(values)] = torch.tensor(values)
    operand = rowwise(x, Float8Format(E2M1, Tile(1, 16), ScaleRule.TWO_LEVEL))
    both = bits(operand.data).flatten().tolist()
    codes = [code for byte in both for code in (byte & 0xF, byte >> 4)]
    blocks = [codes[16 * i : 16 * i + len(values)] for i, values in enumerate(tiles)]
    return operand.global_scale_inv.item(), bits(operand.scale_inv).flatten().tolist(), blocks


def test_edge_values_of_two_levels():
    """e2m1 codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; 8 is the sign. The matrix's amax is 2688 = 6 * 448, so its own
    scale is 1 and a tile's is amax / 6, rounded to e4m3.

    - amax 2688: 448, the code 0x7E. The values are 448 times 6, 0.5, and the middles of two codes, which go to the even
      code: 0.25 to 0, 0.75 to 1 (2), 1.25 to 1 (2), 1.75 to 2 (4), 2.5 to 2 (4), 3.5 to 4 (6), 5 to 4 (6).
    - amax 6: 1, the code 0x38.
    - Zeros: scale 1, and -0 keeps its sign.
    - amax 6 * 2**-9: the smallest subnormal of e4m3, 0x01.
    - amax 6 * 2**-12: no smaller scale, so 6 / 8 = 0.75 of it remains, which goes to 1 (2).
    - amax 6 * 1.0625: the middle of 1 and 1.125 goes to 1, and 6.375 is clamped to 6.
    - amax 6 * 1.1875: the middle of 1.125 and 1.25 goes to 1.25 (0x3A); 7.125 / 1.25 = 5.7, nearest to 6.
    """
    middles = [448 * value for value in (6, 0.5, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6)]
    found = two_levels(
        middles,
        [6, 3, 1, 0.5, 0.25, -4],
        [0.0, -0.0],
        [6 * 2.0**-9, -(2.0**-9)],
        [6 * 2.0**-12],
        [6 * 1.0625],
        [6 * 1.1875],
    )
    assert found == (
        1.0,
        [0x7E, 0x38, 0x38, 0x01, 0x01, 0x38, 0x3A],
        [[7, 1, 0, 2, 2, 4, 4, 6, 6, 15], [7, 5, 2, 1, 0, 14], [0, 8], [7, 10], [2], [7], [7]],
    )


def test_edge_values_of_the_scale_of_the_matrix():
    """amax / 2688, and 1 for zeros; at most 2**126 as a scale together with the smallest tile's, 2**-9.

    So its inverse is at least 2**-117, and an amax of 2**-126 has a tile scale of 2**-126 / 6 * 2**117, less than half
    of 2**-9, which is the smallest: 2**-126 / 2**-126 = 1 is the code 2.
    """
    assert two_levels([0.0, 0.0]) == (1.0, [0x38], [[0, 0]])
    assert two_levels([2688 * 2.0**10, 448 * 2.0**10]) == (2.0**10, [0x7E], [[7, 2]])
    assert two_levels([2.0**-126]) == (2.0**-117, [0x01], [[2]])
