"""Where the parts of a group's gradients lie in what is sent and in what FSDP2 reads."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

BLOCK = 128
"""Elements that share an exponent: 1/128 byte an element, and all of them are of one row of a usual weight."""

ALIGNMENT = 16
"""Bytes: the widest access of a GPU's thread. Each chunk's codes and each row begin at multiples of it."""


class Chunk(NamedTuple):
    """The ``size`` elements of one gradient that one rank keeps.

    Their codes begin at byte ``code_at`` of a row of the wire, their exponents at byte ``scale_at``, and their sum at
    element ``out_at`` of FSDP2's flat output.
    """

    size: int
    code_at: int
    scale_at: int
    out_at: int

    @property
    def blocks(self) -> int:
        """How many have an exponent."""
        return -(-self.size // BLOCK)


class Layout(NamedTuple):
    """A row of the wire, what one rank sends one other: ``row_bytes`` bytes for the ``numel`` elements that this keeps.

    ``chunks`` are in FSDP2's order. With ``codes`` elements are e4m3 codes with exponents; else they are bfloat16.
    """

    chunks: tuple[Chunk, ...]
    codes: bool
    row_bytes: int
    numel: int


@functools.lru_cache(maxsize=1024)
def layout_of(sizes: tuple[int, ...], *, codes: bool = True) -> Layout:
    """The row of chunks of these sizes: all codes, then all exponents, each chunk with blocks of its own."""
    width, chunks = 1 if codes else 2, []
    begins = [0, *itertools.accumulate(_aligned(width * size) for size in sizes)]
    at = begins[-1]
    for size, begin, out in zip(sizes, begins, itertools.accumulate(sizes, initial=0), strict=False):
        chunks.append(Chunk(size, begin, at if codes else 0, out))
        at += chunks[-1].blocks if codes else 0
    return Layout(tuple(chunks), codes, _aligned(at), sum(sizes))


def chunk_size(shape: Sequence[int], world: int) -> int:
    """Elements of a gradient that each rank keeps, with padded rows; source: FSDP2's ``_get_dim0_padded_size``."""
    return -(-shape[0] // world) * math.prod(shape[1:])


def _aligned(bytes: int) -> int:
    return -(-bytes // ALIGNMENT) * ALIGNMENT
