"""Seconds of grouped products: of tokens with the weight of their expert, and over the tokens of each expert."""

from typing import NamedTuple

from f8sub.estimator.gpus import (
    H200,
    HIGH,
    ROWS,
    SQUARES,
    VECTORS,
    VECTORS_BY_SQUARES,
    WHOLE,
    Gpu,
)
from f8sub.estimator.gpus import kind_of_product as kind_of
from f8sub.recipe import GemmSpec


class Rate(NamedTuple):
    """Of one kind of product on an H200.

    Attributes:
        flops: FLOP/s of a large one.
        written: how many times its results' bytes are written at a copy's speed, after it was multiplied.
    """

    flops: float
    written: float


RATES = {
    HIGH: Rate(800e12, 1),
    ROWS: Rate(1530e12, 1.5),
    VECTORS_BY_SQUARES: Rate(1400e12, 1),
    VECTORS: Rate(970e12, 1),
    WHOLE: Rate(1530e12, 1),
    SQUARES: Rate(1400e12, 1),
}
"""Fitted to the 39 products of docs/experts.md with groups of equal size, which they hit within 8 %. Products of
squares alone were not timed: they have the rate of vectors by squares."""

ON = {"H100": {HIGH: 0.96}}
"""Shares of these rates by GPU. An H100's is fitted to the bf16 products and steps of docs/experts.md on one.

Without it those products are predicted 3 % too fast on average, and steps 5 %; float8's products are within 1 %.
"""

READ_AGAIN = 3
"""Bytes moved for each element that the backend ``dequantize`` reads as bf16 before torch multiplies it."""


def by_expert_seconds(spec: GemmSpec, m: float, k: float, n: float, experts: int, gpu: Gpu) -> float:
    """Of fprop and dgrad: (m, k) tokens by (experts, n, k), to (m, n) in bf16."""
    return _seconds(spec, 2 * m * n * k, (m * k, experts * n * k), m * n, gpu)


def over_tokens_seconds(spec: GemmSpec, m: float, n: float, k: float, experts: int, gpu: Gpu) -> float:
    """Of wgrad: (n, m) by (k, m) over each expert's part of m, to (experts, n, k) in bf16."""
    return _seconds(spec, 2 * m * n * k, (m * n, m * k), experts * n * k, gpu)


def _seconds(spec: GemmSpec, flops: float, read: tuple[float, float], written: float, gpu: Gpu) -> float:
    kind = kind_of(spec)
    native = kind == HIGH or kind in gpu.grouped
    used = kind if native else HIGH
    rate = RATES[used]
    of_gpu = rate.flops * gpu.rates[used] / H200.rates[used] * ON.get(gpu.name, {}).get(used, 1.0)
    sizes = [
        2.0 if operand is None or not native else 1 / operand.codes_per_byte for operand in (spec.a, spec.b)
    ]
    moved = sum(elements * size for elements, size in zip(read, sizes, strict=True))
    again = 0.0 if native else sum(read) * READ_AGAIN
    return max(flops / of_gpu, moved / gpu.copy) + (rate.written * 2 * written + again) / gpu.copy
