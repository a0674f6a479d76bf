"""Layer 4. Tensor parallelism: one layer's three GEMMs spread over ranks that have a part of its weight each.

| w         | x         | y         | dy        | dx        | dw        | bias                     |
| --------- | --------- | --------- | --------- | --------- | --------- | ------------------------ |
| Shard(0)  | whole     | Shard(-1) | Shard(-1) | Partial   | Shard(0)  | Shard(0)                 |
| Shard(1)  | Shard(-1) | Partial   | whole     | Shard(-1) | Shard(1)  | whole; rank 0 adds it    |
| whole     | whole     | whole     | whole     | whole     | whole     | whole                    |
| whole     | of tokens | of tokens | of tokens | of tokens | Partial   | whole; its grad: Partial |

GEMMs are of local matrices. Scales are those of the whole matrices, whatever the number of ranks: where a tile reaches
over ranks its amax is reduced over them, one all-reduce an operand. One thing is the rank's own: the column scales
that a re-encoded weight gets (see ``reference.derive_columnwise``) are of the codes that its GEMM reads.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from f8sub import backends
from f8sub.errors import Float8ConfigError
from f8sub.formats import ALL, Float8Format, Operand, Tile
from f8sub.recipe import OperandName, Recipe
from f8sub.scaling_state import OPERANDS, Past, W, quantize_delayed
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.tensor.master_weight import MasterWeight
from f8sub.tensor.primary_weight import PrimaryWeight

if TYPE_CHECKING:
    from f8sub.linear import Float8Linear


@dataclass(frozen=True, slots=True)
class Cut:
    """How a matrix is cut over the ranks of a mesh; called, it is ``reference.Across``.

    Attributes:
        dim: the dimension it is cut along.
        whole: its extent along that; 0 for tokens, whose parts follow each other in no order that tiles could have.
        part: that of all parts but the last ones.
        mesh: of one dimension.
    """

    dim: int
    whole: int
    part: int
    mesh: DeviceMesh

    def __call__(self, amax: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Amaxes of this rank's tiles to those of the whole matrix's, all of them on every rank alike."""
        edge = (tile.rows, tile.cols)[self.dim]
        if edge == ALL:
            return largest_of_ranks(amax, self.mesh)
        if not self.whole or self.part % edge == 0:
            return amax
        # Parts that lie within one tile.
        tiles = list(amax.shape)
        tiles[self.dim] = -(-self.whole // edge)
        first = min(self.mesh.get_local_rank() * self.part, self.whole - 1) // edge
        whole = amax.new_zeros(tiles)
        whole.narrow(self.dim, first, amax.shape[self.dim]).copy_(amax)
        return largest_of_ranks(whole, self.mesh).narrow(self.dim, first, amax.shape[self.dim])


def largest_of_ranks(amax: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The elementwise maximum over the ranks of a mesh of one dimension; no NaN in it."""
    reduced = _functional_collectives.all_reduce(amax.contiguous(), "max", (mesh, 0))
    done: torch.Tensor = _functional_collectives.wait_tensor(reduced)
    return done


@dataclass(frozen=True, slots=True)
class Placements:
    """Of what a layer's forward and backward read and make, see the module's docstring."""

    x: Placement
    y: Placement
    dx: Placement
    dw: Placement
    dbias: Placement

    @classmethod
    def of(cls, weight: Placement, x: Placement, last: int) -> "Placements":
        """Those that follow from a weight's.

        Args:
            weight: of the weight.
            x: of the layer's input as it comes.
            last: index of x's last dimension.
        """
        if weight.is_shard(0):
            return cls(Replicate(), Shard(last), Partial(), Shard(0), Shard(0))
        if weight.is_shard(1):
            return cls(Shard(last), Partial(), Shard(last), Shard(1), Replicate())
        if x.is_shard() and not x.is_shard(last):
            return cls(x, x, x, Partial(), Partial())
        return cls(Replicate(), Replicate(), Replicate(), Replicate(), Replicate())


class Spread:
    """One call of a layer whose weight is a DTensor: its operands' places, and how their scales are made.

    Attributes:
        received: whether x came in float8, so that its columnwise operand is derived from those codes, in backward.
        adds_bias: whether this rank's y has the bias in it.

    Args:
        layer: whose ``weight`` is (N, K) and on a mesh of one dimension.
        x: its input, (..., K).
        recipe: of the call.
        past: of delayed scaling; None for current scaling.

    Raises:
        Float8ConfigError: an input that is no DTensor on the weight's mesh, a weight that is not there whole but for
            tensor parallelism, or a recipe whose tiles the cuts go through.
    """

    def __init__(self, layer: "Float8Linear", x: torch.Tensor, recipe: Recipe, past: Past | None) -> None:
        weight = layer.weight
        if not isinstance(weight, DTensor):
            raise RuntimeError(
                f"{layer.fqn}: a matmul is spread over ranks by its weight, which is no DTensor"
            )
        mesh = weight.device_mesh
        if mesh.ndim != 1 or isinstance(weight._local_tensor, PrimaryWeight):
            raise Float8ConfigError(
                f"{layer.fqn}: its weight has placements {weight.placements} on {mesh} as "
                f"{type(weight._local_tensor).__name__}; float8 matmuls take weights on a tensor-parallel mesh of one "
                "dimension: call the layer through the module that fully_shard was called on, and take primary_weights "
                "with fully_shard alone"
            )
        if not isinstance(x, DTensor) or x.device_mesh != mesh:
            raise Float8ConfigError(
                f"{layer.fqn}: its weight has placements {weight.placements} on {mesh}, and its input is "
                f"{f'on {x.device_mesh}' if isinstance(x, DTensor) else 'no DTensor'}; give the layer a style in "
                "parallelize_module's plan, or call it inside the module that fully_shard was called on"
            )
        self.fqn = layer.fqn
        self.past = past
        self.mesh = mesh
        self.received = isinstance(x._local_tensor, Float8Tensor)
        self.shape = (*x.shape[:-1], weight.shape[0])
        self.places = places = Placements.of(weight.placements[0], x.placements[0], x.dim() - 1)
        self.adds_bias = not places.y.is_partial() or mesh.get_local_rank() == 0
        self.cuts = _cuts(layer.fqn, recipe, (weight.shape[0], weight.shape[1]), places, mesh)
        self._weight_amax: torch.Tensor | None = None

    def local(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """This rank's x, w and bias; x is sent around first where it lies otherwise than the weight needs it."""
        places = self.places
        if not (isinstance(x, DTensor) and isinstance(weight, DTensor)):
            raise RuntimeError("the operands of a spread matmul are DTensors")
        if x.placements != (places.x,):
            x = x.redistribute(placements=(places.x,))
        if isinstance(bias, DTensor):
            bias = bias.to_local(grad_placements=(places.dbias,))
        return (
            x.to_local(grad_placements=(places.dx,)),
            weight.to_local(grad_placements=(places.dw,)),
            bias,
        )

    def whole(self, y: torch.Tensor) -> DTensor:
        """The layer's output, of this rank's."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            y, self.mesh, (self.places.y,), run_check=False, shape=torch.Size(self.shape), stride=stride
        )

    def quantize(
        self,
        operand: int,
        matrix: torch.Tensor,
        formats: tuple[Float8Format | None, Float8Format | None],
        any_layout: bool,
    ) -> tuple[Operand | None, Operand | None]:
        """Both operands of this rank's part of x or dy, see ``backends.quantize``; staged in training.

        Args:
            operand: index of it in ``OPERANDS``.
            matrix: (rows, cols), flattened; in float8 where it was ``received``.
            formats: (rowwise, columnwise).
            any_layout: see ``reference.quantize``.

        Returns:
            (rowwise, columnwise); twice the same of what was received.
        """
        if isinstance(matrix, Float8Tensor):
            return self._received(matrix, formats)
        if formats == (None, None):
            return None, None
        cut = self.cuts[operand]
        if self.past is None:
            return backends.quantize(matrix, *formats, any_layout, cut)
        return quantize_delayed(self.past, operand, matrix, formats, any_layout, cut)

    def _received(
        self, matrix: Float8Tensor, formats: tuple[Float8Format | None, Float8Format | None]
    ) -> tuple[Operand | None, Operand | None]:
        wanted, rowwise = formats[0], matrix.rowwise
        if rowwise is None or rowwise.format != wanted:
            raise Float8ConfigError(
                f"{self.fqn}: its input came in float8 as {matrix!r}, and the recipe in use reads x as {wanted}; give "
                "the layers that share an input recipes that read it alike, and enter f8sub.autocast around the "
                "module whose style sends it"
            )
        return rowwise, None if formats[1] is None else rowwise

    def quantize_weight(
        self, weight: torch.Tensor, formats: tuple[Float8Format | None, Float8Format | None]
    ) -> Operand:
        """This rank's part of a weight that was not gathered in float8, for one usage; see ``quantize``."""
        values = weight.plain if isinstance(weight, MasterWeight) else weight
        cut = self.cuts[W]
        across = None if cut is None else functools.partial(self._amax_of_weight, cut)
        if self.past is None:
            row, col = backends.quantize(values, *formats, False, across)
        else:
            past = self.past.state.past(W)
            row, col, _ = backends.quantize_delayed(values, past, *formats, False, across)
        operand = row or col
        if operand is None:
            raise RuntimeError("quantize returned no operand for a format")
        return operand

    def _amax_of_weight(self, cut: Cut, amax: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Reduced in forward; backward casts with the same scales and communicates nothing."""
        if torch.compiler.is_compiling():
            return cut(amax, tile)
        if self._weight_amax is None:
            self._weight_amax = cut(amax, tile)
        return self._weight_amax


Cuts = tuple[Cut | None, Cut | None, Cut | None]


@functools.cache
def _cuts(fqn: str, recipe: Recipe, shape: tuple[int, int], places: Placements, mesh: DeviceMesh) -> Cuts:
    """How x, w and dy are cut, each as the matrix that is quantized; None where ranks need not know of each other."""
    (rows, cols), world = shape, mesh.size()
    tokens = Cut(0, 0, 0, mesh)
    by_rows, by_cols = (-(-extent // world) for extent in shape)
    if places.dw.is_shard(0):
        cuts: Cuts = None, Cut(0, rows, by_rows, mesh), Cut(1, rows, by_rows, mesh)
    elif places.dw.is_shard(1):
        cuts = Cut(1, cols, by_cols, mesh), Cut(1, cols, by_cols, mesh), None
    elif places.x.is_shard():
        cuts = tokens, None, tokens
    else:
        cuts = None, None, None
    if world == 1:
        return None, None, None
    needed = (_cut_if_needed(cut, name, recipe, fqn) for name, cut in zip(OPERANDS, cuts, strict=True))
    x, w, dy = needed
    return x, w, dy


def _cut_if_needed(cut: Cut | None, operand: OperandName, recipe: Recipe, fqn: str) -> Cut | None:
    if cut is None:
        return None
    row, col = recipe.formats(operand)
    if operand == "w":
        col = None if row is not None else col  # derived from this rank's codes
    seen = [(f, f.tile if f is row else f.tile.t()) for f in (row, col) if f is not None]
    for format, tile in seen:
        if format.scale_rule.has_global or format.depth_multiple > 1:
            raise Float8ConfigError(
                f"{fqn}: tensor parallelism cuts its {operand}, and recipe {recipe.name!r} reads it as {format}, whose "
                "scales or packing go over parts; convert the layer with a recipe of one scale level and one element a "
                "byte, or leave it out of parallelize_module's plan"
            )
        if cut.whole:
            tile.check_cut(cut.dim, cut.whole, cut.part, f"{fqn}: its {operand}")
    edges = [(tile.rows, tile.cols)[cut.dim] for _, tile in seen]
    crossed = any(edge == ALL or (cut.whole and cut.part % edge) for edge in edges)
    return cut if crossed else None
