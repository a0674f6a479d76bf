"""Operands of products by groups, and what each group's product should be."""

import itertools
from collections.abc import Sequence

import torch

from f8sub import ALL, Float8Format, Operand, Tile
from f8sub.kernels import reference
from f8sub.kernels.gemm.tuning import Rows
from tests.data_sets import gaussian, generator
from tests.kernels.products import (
    BLOCK,
    E4M3,
    LARGE,
    LARGE_E5M2,
    ROW,
    ROW_E5M2,
    TENSOR,
    TENSOR_E5M2,
    VECTOR,
    exact,
)
from tests.oracle import Product

PAIRS = {
    "rowwise": (ROW, ROW),
    "rowwise e5m2": (ROW_E5M2, ROW),
    "tensorwise": (TENSOR, TENSOR),
    "tensorwise e5m2": (TENSOR_E5M2, TENSOR),
    "row x tensor": (ROW, TENSOR),
    "1x128 x 128x128": (VECTOR, BLOCK),
    "1x128 x 1x128": (VECTOR, VECTOR),
    "256x256": (LARGE, LARGE),
    "256x256 e5m2": (LARGE_E5M2, LARGE),
    "1x128 x row": (VECTOR, ROW),
    "row x 128x128": (ROW, BLOCK),
    "128x128 x 1x256": (BLOCK, Float8Format(E4M3, Tile(1, 256))),
}
"""Formats of a and b; the last three are of no recipe."""

GROUPS = {
    "even": [128, 128],
    "ragged": [37, 1, 0, 130, 16],
    "one token": [0, 1, 0],
    "first and last empty": [0, 5, 300, 0],
    "all empty": [0, 0],
    "one expert": [133],
}
TAIL = 7
"""Rows past the last group, which hold NaN."""


class Case:
    """Codes of the rows and matrices of some groups, made group by group by the reference."""

    def __init__(
        self, pair: tuple[Float8Format, Float8Format], counts: Sequence[int], cols: int, depth: int
    ) -> None:
        self.pair, self.counts, self.cols, self.depth = pair, counts, cols, depth
        self.rng = generator(1)

    def made(self, rows: int, cols: int, format: Float8Format) -> Operand:
        spread = gaussian((rows, 1), self.rng).exp() if format.tile.rows == 1 else 1.0
        return reference.quantize(gaussian((rows, cols), self.rng) * spread / 30, format, None)[0]

    def starts(self, edge: int) -> list[int]:
        """Where groups begin that begin at multiples of ``edge``, and how many rows there are in all."""
        room = [-(-count // edge) * edge for count in self.counts]
        return [0, *itertools.accumulate(room)]


def rows_of(starts: Sequence[int], counts: Sequence[int], count: int) -> Rows:
    """Groups of ``counts`` rows that begin at ``starts``, of ``count`` rows in all."""
    first = torch.tensor(starts[: len(counts)], dtype=torch.int32)
    return Rows(first, first + torch.tensor(counts, dtype=torch.int32), first, count)


class ByRows(Case):
    """(M, K) x (E, N, K)."""

    def operands(self) -> tuple[Operand, Operand, Rows]:
        """a, b and where groups lie; what is not of a group is NaN."""
        format, tile = self.pair[0], self.pair[0].tile
        edge = tile.rows if tile.rows not in (1, ALL) else 1
        starts = self.starts(edge)
        self.parts = [self.made(count, self.depth, format) for count in self.counts]
        self.weights = [self.made(self.cols, self.depth, self.pair[1]) for _ in self.counts]
        data = torch.full((starts[-1] + TAIL * edge, self.depth), 0x7F, dtype=torch.uint8).view(format.dtype)
        shape = (len(self.counts), 1) if tile.rows == ALL else tile.scale_shape(tuple(data.shape))
        scale = torch.full(shape, torch.nan)
        for group, (start, part) in enumerate(zip(starts, self.parts, strict=False)):
            data.view(torch.uint8)[start : start + len(part.data)] = part.data.view(torch.uint8)
            first = group if tile.rows == ALL else start // edge
            scale[first : first + len(part.scale_inv)] = part.scale_inv[: len(scale) - first]
        codes = torch.stack([one.data.view(torch.uint8) for one in self.weights]).view(self.pair[1].dtype)
        b = Operand(codes, torch.stack([one.scale_inv for one in self.weights]), self.pair[1])
        count = sum(self.counts) + TAIL
        rows = rows_of(self.starts(1), self.counts, count)._replace(
            placed=rows_of(starts, self.counts, 0).first
        )
        return Operand(data, scale, format), b, rows

    def groups_right(self) -> list[Product]:
        """Each group's product."""
        return [Product(exact(a), exact(b)) for a, b in zip(self.parts, self.weights, strict=True)]

    def split(self, out: torch.Tensor) -> list[torch.Tensor]:
        """Each group's rows of a result, then those past the last group."""
        return list(out.split([*self.counts, TAIL]))


class OverRows(Case):
    """(N, M) x (K, M) by groups that begin at multiples; ``cols`` is N and ``depth`` is K."""

    def operands(self) -> tuple[Operand, Operand, Rows]:
        """a, b and where groups lie; between them are zeros, and scales of blocks that are NaN."""
        edge = max(128, *(f.tile.cols for f in self.pair))
        starts = self.starts(edge)
        rows = rows_of(starts, self.counts, starts[-1] + edge)
        self.parts = []
        found = []
        for format, lines in zip(self.pair, (self.cols, self.depth), strict=True):
            parts = [self.made(lines, count, format) if count else None for count in self.counts]
            data = torch.zeros(lines, starts[-1] + edge, dtype=torch.uint8)
            is_whole = format.tile.cols == ALL
            shape = format.tile.scale_shape(tuple(data.shape))
            # Of no rows the amax is 0, and the scale 1.
            scale = torch.full(*(((len(parts), shape[0]), 1.0) if is_whole else (shape, torch.nan)))
            for group, (start, part) in enumerate(zip(starts, parts, strict=False)):
                if part is None:
                    continue
                data[:, start : start + part.data.shape[1]] = part.data.view(torch.uint8)
                if is_whole:
                    scale[group] = part.scale_inv[:, 0]
                else:
                    first = start // format.tile.cols
                    scale[:, first : first + part.scale_inv.shape[1]] = part.scale_inv
            found.append(Operand(data.view(format.dtype), scale, format))
            self.parts.append(parts)
        return found[0], found[1], rows

    def groups_right(self) -> list[Product | None]:
        """Each group's product; None without rows."""
        return [
            None if a is None or b is None else Product(exact(a), exact(b))
            for a, b in zip(*self.parts, strict=True)
        ]
