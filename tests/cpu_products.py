"""What torch multiplies natively on a CPU, which its versions differ in."""

import pytest

from f8sub.kernels.gemm import scaled_mm


def natively_by_rows() -> bool:
    """Whether ``torch._scaled_mm`` takes one scale a row here; torch 2.11 does not."""
    return scaled_mm._why_not_rows_on_the_cpu() is None


def skip_without_rows(*formats: object) -> None:
    """Of formats, where one of them has a scale a row; else in any case."""
    by_rows = not formats or any(getattr(format, "tile", None) == scaled_mm.ROWWISE for format in formats)
    if by_rows and not natively_by_rows():
        pytest.skip("this torch multiplies rowwise operands on a GPU alone, or in the reference")
