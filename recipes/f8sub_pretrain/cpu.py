"""Products of bfloat16 matrices on CPUs that have no instructions for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

PRODUCTS = ("mm", "addmm", "bmm")
"""Operators of eager code. Compiled code calls their variants with ``out``, which stay torch's."""


def is_bfloat16_slow() -> bool:
    """Whether torch multiplies bfloat16 matrices one element at a time.

    oneDNN has bfloat16 products from AVX-512 on. Without them torch 2.13 reaches 1 to 7 GFLOP/s per core of an EPYC
    that has AVX2 alone; in float32 it reaches 63 there.
    """
    return torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


@contextmanager
def bfloat16_products_in_float32() -> Iterator[None]:
    """Multiply CPU matrices of bfloat16 as float32 ones, and round the result, until the end of the ``with`` block.

    These are the same products: oneDNN adds in float32 and rounds once, too. The order of its additions is another.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Warning only once for all operators"
        )  # that these have kernels already
        for name in PRODUCTS:
            library.impl(name, _product(getattr(torch.ops.aten, name).out), "CPU")
    try:
        yield
    finally:
        library._destroy()


def _product(into: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An operator's kernel, by its variant with ``out``."""

    def product(*matrices: torch.Tensor, **factors: float) -> torch.Tensor:
        a, b = matrices[-2:]
        size = (*a.shape[:-1], b.shape[-1])
        if a.dtype != torch.bfloat16:
            return into(*matrices, **factors, out=a.new_empty(size))
        product = into(
            *(each.float() for each in matrices), **factors, out=a.new_empty(size, dtype=torch.float32)
        )
        return product.bfloat16()

    return product
