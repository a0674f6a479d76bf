"""The rules from amax to scale, and the sources of scales.

A ``ScaleSource`` says whether a matrix is scaled by its current amax or by a scale that was made before, and over which
ranks an amax is reduced. ``quantize`` takes one; features make their own.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

import torch

from f8sub.formats import ALL, Float8Format, Tile
from f8sub.kernels.graph_ops import enter_graph_functions, in_graph, save_when_checkpointed

_EXPONENT_BITS = 0x7F800000

ReduceAmax = Callable[[torch.Tensor, Tile], torch.Tensor]
"""For a part of a matrix: from the amaxes of the part's tiles to those of the same tiles of the whole matrix."""


def largest_scale() -> float:
    """Cap on scales: the largest power of two whose inverse is a normal float32."""
    return 2.0**126


def smallest_scale() -> float:
    """The inverse of ``largest_scale``."""
    return 2.0**-126


class Scales(NamedTuple):
    """The scales of one matrix: what multiplies before the cast, float32, one a tile, and the two of ``Operand``."""

    scale: torch.Tensor
    scale_inv: torch.Tensor
    global_scale_inv: torch.Tensor | None


class PriorScale(NamedTuple):
    """A scale that was made before the matrix was known.

    Attributes:
        scale: float32, one entry a tile; 0 where there is none yet: then the current amax makes it.
        margin: powers of two of headroom that a scale made so leaves.
        covers: whether the scale is lowered to what the current amax needs, so that nothing saturates.
        is_known: whether ``scale`` is known not to be 0: then a cast need not wait for the current amax.
    """

    scale: torch.Tensor
    margin: float
    covers: bool
    is_known: bool = False


class ScaleSource(Protocol):
    """How the scales of one matrix come about; a frozen value."""

    @property
    def reduce(self) -> ReduceAmax | None:
        """Makes the amaxes of a part those of the whole matrix; None for a whole one."""

    def prior(self) -> PriorScale | None:
        """The scale that was made before; None to make it of the current amax."""


class LayerSource(ScaleSource, Protocol):
    """The source of one operand in one call of a layer."""

    @property
    def key(self) -> Hashable:
        """Sources without ``reduce`` whose keys are equal make equal scales of one matrix."""

    @property
    def generation(self) -> int:
        """Another number whenever the prior scale may be another."""

    def over(self, reduce: ReduceAmax) -> "LayerSource":
        """The same for a part of a matrix."""

    def keep(self, amax: torch.Tensor, event: int | None = None) -> None:
        """Take ``Quantized.amax`` of a matrix that was quantized with the prior scale.

        ``event`` is another number for every matrix that was quantized; None where nobody counted.
        """


class CurrentScales(NamedTuple):
    """Scales of the matrix's own current amax."""

    reduce: ReduceAmax | None = None

    @property
    def key(self) -> None:
        """Equal for all of them."""

    @property
    def generation(self) -> int:
        """It never changes."""
        return 0

    def over(self, reduce: ReduceAmax) -> "CurrentScales":
        """The same for a part of a matrix."""
        return self._replace(reduce=reduce)

    def prior(self) -> None:
        """There is none."""

    def keep(self, amax: torch.Tensor, event: int | None = None) -> None:
        """Nothing is kept."""


class GivenScale(NamedTuple):
    """A scale that the caller has, such as that of an earlier quantization of the same matrix."""

    value: PriorScale
    reduce: ReduceAmax | None = None

    def prior(self) -> PriorScale:
        """The scale."""
        return self.value


CURRENT = CurrentScales()
"""The source of most matrices."""


class Sources(NamedTuple):
    """The sources of the scales of x, w and dy in one call of a layer; its forward makes them.

    ``distributed`` says whether x and w are the local tensors of DTensors. Nobody counts all writes to those, so that
    no codes of them are kept for a later call; and x may come in float8.
    """

    x: LayerSource = CURRENT
    w: LayerSource = CURRENT
    dy: LayerSource = CURRENT
    distributed: bool = False


CURRENT_SOURCES = Sources()


def amax(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Largest finite magnitude of each tile of a matrix, float32, ``tile.scale_shape(x.shape)``; 0 where there is none.

    NaN and infinity take no part, so that one bad element does not decide the scale of its neighbours.
    """
    if not torch.compiler.is_compiling():
        return finite_amax(x, tile)
    enter_graph_functions()
    return _amax_in_graph(x, tile.rows, tile.cols)


def finite_amax(x: torch.Tensor, tile: Tile) -> torch.Tensor:  # noqa: D103
    return largest(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0), tile)


@in_graph
def _amax_in_graph(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    magnitudes = x.abs()
    # As ``finite_amax`` in fewer instructions an element: NaN is not below infinity.
    finite = torch.where(magnitudes < torch.inf, magnitudes, 0.0)
    # dynamo hands constants over as SymInts where shapes are dynamic.
    found = _largest_of(finite, Tile(int(rows), int(cols)), by_rows=True)
    # No checkpointed function finds it again in backward: it is small, and finding it reads x.
    save_when_checkpointed(torch.ops.aten.amax.default)
    return found


def shard_amax(shard: torch.Tensor, tile: Tile, offset: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of every tile of a matrix that a shard of it touches.

    ``shard`` is (rows, cols) and begins at ``offset``, a row and column of the matrix, where no tile need begin. The
    result is float32, one entry a touched tile, the first of them
    ``first_tile(tile, offset)``; infinity where a tile holds NaN or infinity.
    """
    edges = zip((tile.rows, tile.cols), offset, strict=True)
    before = [0 if edge == ALL else start % edge for edge, start in edges]
    if any(before):
        # Zeros in front bring the shard to the edge of a tile, and raise no amax.
        shard = torch.nn.functional.pad(shard, (before[1], 0, before[0], 0))
    return torch.nan_to_num(largest(shard, tile), nan=torch.inf, posinf=torch.inf)


def first_tile(tile: Tile, offset: tuple[int, int]) -> tuple[int, int]:
    """Index of the tile that the element at ``offset`` lies in."""
    row, col = offset
    return 0 if tile.rows == ALL else row // tile.rows, 0 if tile.cols == ALL else col // tile.cols


def largest(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Largest magnitude of each tile, as ``amax`` lays it out; infinity or NaN where an element is."""
    return _largest_of(x.abs(), tile, by_rows=torch.compiler.is_compiling())


def _largest_of(a: torch.Tensor, tile: Tile, *, by_rows: bool) -> torch.Tensor:
    """The largest element of each tile; with ``by_rows`` that of a whole matrix is the largest of its rows' largest."""
    # torch's amax of no elements is an error.
    if a.numel() == 0:
        return a.new_zeros(tile.scale_shape((a.shape[0], a.shape[1])), dtype=torch.float32)
    # Inductor reduces rows in the kernel that computes them, and a whole matrix in one that reads it again.
    if by_rows and tile.rows == tile.cols == ALL:
        a = a.amax(1, keepdim=True)
    # Written out for both dimensions: dynamo traces loops step by step, and this runs in every layer.
    whole = ((0,) if tile.rows == ALL else ()) + ((1,) if tile.cols == ALL else ())
    if whole:
        a = a.amax(whole, keepdim=True)
    # Not ``-shape % edge`` and -1: Inductor (2.13) keeps code of such dynamic shapes on disk without the guard that the
    # padded matrix was one tile wide.
    count = tile.scale_shape((a.shape[0], a.shape[1]))
    if tile.rows not in (1, ALL):
        a = torch.nn.functional.pad(a, (0, 0, 0, count[0] * tile.rows - a.shape[0]))
        a = torch.unflatten(a, 0, (count[0], tile.rows)).amax(1)
    if tile.cols not in (1, ALL):
        a = torch.nn.functional.pad(a, (0, count[1] * tile.cols - a.shape[1]))
        a = torch.unflatten(a, 1, (count[1], tile.cols)).amax(2)
    return a.float()


def scales_from_amax(amax: torch.Tensor, format: Float8Format) -> Scales:
    """All scales of one matrix, from the finite amaxes of all its tiles, float32, ``format.tile.scale_shape``.

    With two levels, the matrix's scale takes its amax to the largest e2m1 times the largest e4m3; the tile's takes what
    is left to the largest e2m1, rounded to e4m3 (arXiv 2509.25149, appendix C). Divided in float64, rounded to float32
    and that to e4m3, as torch casts a float64.
    """
    if not format.scale_rule.has_global:
        made = with_inverse(scale_from_amax(amax, format))
        return made._replace(scale_inv=made.scale_inv.to(format.scale_rule.stored_as))
    exact = amax.double()
    largest = exact.max() if exact.numel() else exact.new_zeros(())
    top = torch.finfo(torch.float8_e4m3fn).max
    # The smallest e4m3: no tile's inverse scale is 0.
    smallest_block_inv = 2.0**-9
    # A tile's scale is the inverse of a product of both, and so at most ``largest_scale()``.
    smallest = 1.0 / (largest_scale() * smallest_block_inv)
    global_inv = torch.where(largest == 0, 1.0, (largest / (format.max * top)).clamp(min=smallest)).float()
    block_inv = (exact / (format.max * global_inv.double())).clamp(smallest_block_inv, top)
    stored = torch.where(amax == 0, 1.0, block_inv).float().to(torch.float8_e4m3fn)
    scale = (stored.double() * global_inv).reciprocal().float()
    return Scales(scale, stored, global_inv.view(1, 1))


def scales_or_nan(amax: torch.Tensor, format: Float8Format, prior: PriorScale | None = None) -> Scales:
    """Scales of amaxes that are infinite where a tile holds NaN or infinity: NaN there, as are the tile's codes then.

    ``amax`` is float32; a prior scale has its shape.
    """
    bad = amax.isinf()
    finite = amax.masked_fill(bad, 0.0)
    if prior is not None:
        return with_inverse(scale_now(prior, finite, format).masked_fill(bad, torch.nan))
    scale, scale_inv, global_scale_inv = scales_from_amax(finite, format)
    # Not every dtype of scales can be filled.
    scale_inv = scale_inv.float().masked_fill(bad, torch.nan).to(scale_inv.dtype)
    return Scales(scale.masked_fill(bad, torch.nan), scale_inv, global_scale_inv)


def with_inverse(scale: torch.Tensor) -> Scales:
    """Scales of one level and their inverses, both float32."""
    # By way of float64: Triton's float32 division, which compiled code on CUDA takes, is off by an ulp at times.
    return Scales(scale, scale.double().reciprocal().float(), None)


def scale_from_amax(amax: torch.Tensor, format: Float8Format) -> torch.Tensor:
    """The rule from finite amaxes to scales of one level: ``format.max / amax``, and 1 for a tile that is all zero.

    The scales are float32, finite and with a finite inverse. Divided in float64 and rounded once to float32, so that
    eager and compiled code agree to the bit. Powers of two are rounded down by clearing the mantissa, which is exact
    where ``exp2(floor(log2()))`` is not.
    """
    scale = torch.div(torch.full_like(amax, format.max, dtype=torch.float64), amax)
    scale = scale.clamp(max=largest_scale()).float()
    if format.scale_rule.is_power_of_2:
        scale = (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return torch.where(amax == 0, 1.0, scale)


def scale_with_margin(amax: torch.Tensor, format: Float8Format, margin: float) -> torch.Tensor:
    """``scale_from_amax`` of an amax ``2**margin`` times as large, which float64 holds; never 0."""
    return scale_from_amax(amax.double() * 2.0**margin, format).clamp(min=smallest_scale())


def scale_now(prior: PriorScale, amax: torch.Tensor, format: Float8Format) -> torch.Tensor:
    """The scale to cast with: the prior scale, or one made of the current amax where there is none.

    ``amax`` is float32, finite, of ``prior.scale``'s shape; so is the result, positive and with a finite inverse.
    """
    scale = prior.scale
    if not prior.is_known:
        scale = torch.where(prior.scale == 0, scale_with_margin(amax, format, prior.margin), prior.scale)
    if not prior.covers:
        return scale
    # The rule gives an amax of zero the scale 1, which would lower most prior scales for nothing.
    return torch.where(amax == 0, scale, torch.minimum(scale, scale_from_amax(amax, format)))
