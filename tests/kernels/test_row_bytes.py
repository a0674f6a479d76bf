"""Rows whose scales lie behind their codes: what the kernel reads of them, interpreted, is what plain PyTorch reads."""

import pytest
import torch

import f8sub
from f8sub.kernels import reference, row_bytes
from tests.data_sets import make
from tests.kernels.interpreted import interpreted
from tests.kernels.products import assert_same_bytes
from tests.selection import long_but

FORMATS = {
    f"{recipe} {operand}": getattr(f8sub.get_recipe(recipe), gemm).a
    for recipe in ("rowwise", "blockwise")
    for operand, gemm in (("x", "fprop"), ("dy", "dgrad"))
}
CASES = [(name, dtype) for name in FORMATS for dtype in (torch.bfloat16, torch.float32, torch.float16)]
SHORT = [("rowwise x", torch.bfloat16), ("blockwise dy", torch.float32)]


@pytest.mark.parametrize(("name", "dtype"), long_but(SHORT, CASES))
@interpreted
def test_values_of_rows(name, dtype, device):
    """Of a wider memory, of as many rows as count; codes that are NaN, and columns that end within a part of a row."""
    format = FORMATS[name]
    for rows, cols, count in ((37, 1088, 21), (8, 128, 8), (5, 64, 0), (3, 512, None), (4, 100, 9)):
        x = make("lognormal", (rows, cols), 3, torch.bfloat16)
        x[0, 5], x[-1, -1], x[0, 0] = torch.nan, torch.inf, 0
        sent = row_bytes.rows_as_bytes(x.to(device), format.name)
        wide = torch.full((rows, 2 * cols), 123, dtype=torch.uint8, device=device)
        wide[:, : sent.shape[1]] = sent
        quantized = reference.quantize(x, format, None).rowwise
        right = reference.dequantize(quantized, dtype)
        assert torch.equal(right.isnan(), ~x.isfinite())
        found = torch.full((rows, cols), 3.0, dtype=dtype, device=device)
        counted = None if count is None else torch.tensor([count], device=device)
        row_bytes.launching(wide, found, format, counted).run()
        end = rows if count is None else min(count, rows)
        assert_same_bytes("values", found[:end].cpu(), right[:end])
        assert (found[end:] == 3).all()
