"""Casts that compute SwiGLU, or its gradient, of what they read, interpreted on the CPU, equal casts of its values."""

import itertools

import pytest
import torch

from f8sub.kernels import cuda
from f8sub.kernels.grouped import operands
from f8sub.kernels.grouped.operands import BOTH, EACH, GATE, RESULT, UP, Gated
from tests.data_sets import make
from tests.kernels.interpreted import interpreted, launched
from tests.kernels.products import assert_same_bytes
from tests.kernels.quantized import FORMATS, INF, NAN
from tests.kernels.test_quantize_groups import COUNTS, EMPTY, groups_of, on, spoiled
from tests.selection import long_but

WIDTH = 256
KERNELS = {
    "tensorwise": "quantize_groups_one_pass",
    "tensorwise-e5m2": "quantize_groups_one_pass",
    "rowwise": "quantize_group_lines_one_pass",
    "1x128": "quantize_paired_vectors",
    "128x128": "quantize_paired_squares",
    "256x256-e5m2": "quantize_paired_squares",
}
SIDES = RESULT, BOTH, EACH, GATE, UP


def gated(groups, side: str, device: str, together: bool = True) -> Gated:
    """Gate and up in one matrix, or in two; some elements are not finite, and rows of no group are NaN."""
    both = spoiled(make("lognormal", (groups.rows, 2 * WIDTH), 5, torch.bfloat16), groups)
    both[0, 3], both[0, WIDTH + 5], both[0, 9] = INF, NAN, -INF
    both = both.to(device)
    gate, up = both.chunk(2, 1) if together else [part.contiguous() for part in both.chunk(2, 1)]
    if side == RESULT:
        return Gated(gate, up)
    dh = spoiled(make("gaussian", (groups.rows, WIDTH), 6, torch.bfloat16), groups)
    return Gated(gate, up, dh.to(device), side)


CASES = [
    case for case in itertools.product(KERNELS, SIDES, ("ragged",)) if case[1] != EACH or "wise" in case[0]
]
SHORT = [
    ("tensorwise", RESULT),
    ("tensorwise-e5m2", BOTH),
    ("rowwise", GATE),
    ("1x128", BOTH),
    ("tensorwise", EACH),
]
MORE = [
    *CASES,
    *(("tensorwise", EACH, kind) for kind in (EMPTY, "all empty")),
    *((name, BOTH, kind) for name in KERNELS for kind in (EMPTY, "all empty", "one token")),
]


@pytest.mark.parametrize(
    ("name", "side", "kind"), long_but([(*case, "ragged") for case in SHORT], dict.fromkeys(MORE))
)
@interpreted
def test_what_is_cast_is_what_torch_computes(name, side, kind, device):
    groups, format = groups_of(COUNTS[kind]), FORMATS[name]
    source = gated(groups, side, device, together=side != GATE)
    values = [one.values().cpu() for one in (source.each() if side == EACH else [source])]
    for row in (format, None):
        with launched() as names:
            found = cuda.quantize_computed(source, on(device, groups), row, format, 128)
        assert names == ["lay_out", KERNELS[name]]
        pairs = [found]
        if side == EACH:
            each = [(None, None) if codes is None else operands.unstacked(codes) for codes in found]
            pairs = list(zip(*each, strict=True))
        for codes, matrix in zip(pairs, values, strict=True):
            check(codes, operands.quantize_both(matrix, groups, row, format, 128), groups)


def check(found, right, groups) -> None:
    """Rows past the last group are undefined in what has x's rows."""
    for codes, wanted in zip(found, right, strict=True):
        if wanted is None:
            assert codes is None
            continue
        data, scale_inv = (codes.data, wanted.data), (codes.scale_inv, wanted.scale_inv)
        if wanted.groups is groups:
            end = int(groups.ends[-1])
            data = data[0][:end], data[1][:end]
            if wanted.format.tile.rows == 1:
                scale_inv = scale_inv[0][:end], scale_inv[1][:end]
        assert_same_bytes("codes", *data)
        assert_same_bytes("scales", *scale_inv)
