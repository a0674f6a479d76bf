"""Casts that look up rows and multiply them, interpreted on the CPU, equal casts of rows that PyTorch put together."""

import pytest
import torch

from f8sub.kernels import cuda
from f8sub.kernels.grouped import operands
from f8sub.kernels.grouped.operands import Groups, Taken
from tests.data_sets import DTYPES, generator, make
from tests.kernels.interpreted import interpreted, launched
from tests.kernels.quantized import INF, NAN
from tests.kernels.test_gated import KERNELS, check
from tests.kernels.test_quantize_groups import COUNTS, EMPTY, GROUP_FORMATS, USAGES, groups_of, on
from tests.selection import long_but

TOKENS = 40
BY_TWO = {
    "tensorwise": ["amax_of_groups", "cast_groups_with_one"],
    "rowwise": ["amax_of_group_lines", "cast_with_lines"],
    "1x128": ["quantize_crossing_vectors"],
    "128x128": ["quantize_group_squares"],
    "256x256-e5m2": ["quantize_group_squares"],
    "1x32-e8m0": ["quantize_group_exponents"],
}
"""What is launched for matrices that no kernel reads in pairs."""
FACTORS = None, torch.bfloat16, torch.float32


def taken(
    groups: Groups,
    factors: torch.dtype | None,
    dtype: torch.dtype = torch.bfloat16,
    cols: int = 256,
    index: torch.dtype = torch.int64,
) -> tuple[Taken, torch.Tensor]:
    """Rows in any order, some more than once; and the matrix that they are.

    Some elements are not finite. Rows of no group are a row of large numbers, times as large ones, that no group has.
    """
    x = make("lognormal", (TOKENS + 1, cols), 5, dtype)
    x[0, 3], x[1, 5], x[2, 9], x[TOKENS] = INF, NAN, -INF, 6e4
    rng, end = generator(7), int(groups.ends[-1])
    rows = torch.randint(TOKENS, (groups.rows,), generator=rng)
    rows[end:] = TOKENS
    if end > 1:
        rows[0], rows[end - 1] = 0, 2
    matrix = torch.stack([x[row] for row in rows.tolist()])
    if factors is None:
        return Taken(x, rows.to(index)), matrix
    by = torch.rand(groups.rows, generator=rng).to(factors)
    by[end:] = 1e4
    return Taken(x, rows.to(index), by), (matrix * by[:, None]).to(dtype)


def cast(source: Taken, matrix: torch.Tensor, groups: Groups, name: str, usages="both", multiple=128) -> None:
    device, format = source.x.device, GROUP_FORMATS[name]
    row, col = (format if is_made else None for is_made in USAGES[usages])
    found = cuda.quantize_computed(source, on(device, groups), row, col, multiple)
    check(found, operands.quantize_both(matrix, groups, row, col, multiple), groups)


def to(device: str, source: Taken) -> Taken:
    return Taken(*(None if tensor is None else tensor.to(device) for tensor in source))


KINDS = "ragged", EMPTY, "all empty", "one token"
SHORT = [
    ("tensorwise", torch.float32, "ragged"),
    ("rowwise", torch.bfloat16, "ragged"),
    ("1x128", None, EMPTY),
    ("128x128", torch.float32, "ragged"),
]
MORE = [(name, factors, kind) for name in KERNELS for factors in FACTORS for kind in KINDS]


@pytest.mark.parametrize(("name", "factors", "kind"), long_but(SHORT, dict.fromkeys([*SHORT, *MORE])))
@interpreted
def test_pairs_of_elements_are_those_of_rows_put_together(name, factors, kind, device):
    from unittest import mock

    from f8sub.kernels.triton import prepared, quantize_grouped_launch

    groups = groups_of(COUNTS[kind])
    source, matrix = taken(groups, factors)
    with (
        mock.patch.object(quantize_grouped_launch, "LEAST_BYTES", 0),
        mock.patch.dict(prepared.cache, clear=True),
        launched() as names,
    ):
        for usages in ("both", "column"):
            names.clear()
            cast(to(device, source), matrix, groups, name, usages)
            assert names == ["lay_out", KERNELS[name]]


SHORT_LINES = [
    ("tensorwise", torch.float32, torch.float16),
    ("rowwise", torch.float32, torch.bfloat16),
    ("128x128", torch.bfloat16, torch.bfloat16),
    ("1x128", torch.bfloat16, torch.bfloat16),
    ("1x32-e8m0", torch.float32, torch.bfloat16),
]
LINES = [(name, factors, dtype) for name in BY_TWO for factors in FACTORS for dtype in DTYPES.values()]


@pytest.mark.parametrize(("name", "factors", "dtype"), long_but(SHORT_LINES, LINES))
@interpreted
def test_elements_of_any_dtype_are_those_of_rows_put_together(name, factors, dtype, device):
    groups = groups_of(COUNTS["ragged"])
    source, matrix = taken(groups, factors, dtype, 144, torch.int32)
    with launched() as names:
        cast(to(device, source), matrix, groups, name)
    assert names == ["lay_out", *BY_TWO[name]]


@pytest.mark.parametrize("name", ["tensorwise", "128x128", "1x32-e8m0"])
@interpreted
def test_one_usage_alone(name, device):
    """As frozen experts need it."""
    groups = groups_of(COUNTS["ragged"])
    source, matrix = taken(groups, torch.float32)
    with launched() as names:
        cast(to(device, source), matrix, groups, name, "row")
    assert names == ["lay_out", *BY_TWO[name]]


@pytest.mark.parametrize(
    ("name", "kernel"), [("rowwise", "quantize_whole_rows"), ("1x128", "quantize_vectors")]
)
@interpreted
def test_codes_of_rows_alone_are_taken_of_those_of_all_tokens(name, kernel, device):
    groups = groups_of(COUNTS["ragged"])
    source, matrix = taken(groups, None)
    with launched() as names:
        cast(to(device, source), matrix, groups, name, "row")
    assert names == [kernel]
    # Multiplied by factors first they are cast both ways.
    source, matrix = taken(groups, torch.float32)
    with launched() as names:
        cast(to(device, source), matrix, groups, name, "row")
    assert names[0] == "lay_out"


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("name", long_but(["tensorwise", "1x128"], GROUP_FORMATS))
def test_the_specification_is_a_cast_of_rows_put_together(name, factors):
    groups, format = groups_of(COUNTS["ragged"]), GROUP_FORMATS[name]
    for dtype in DTYPES.values():
        source, matrix = taken(groups, factors, dtype, 144)
        found = operands.quantize_computed(source, groups, format, format, 128)
        check(found, operands.quantize_both(matrix, groups, format, format, 128), groups)
