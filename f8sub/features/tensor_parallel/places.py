"""Tensor parallelism: one layer's three GEMMs spread over ranks that have a part of its weight each.

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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from f8sub.errors import Float8ConfigError
from f8sub.features.checkpointing.graphs import enter_graph_functions, in_graph, save_when_checkpointed
from f8sub.features.delayed.layers import states_of
from f8sub.features.delayed_state.state import OPERANDS
from f8sub.features.primary_weights.primary_weight import PrimaryWeight
from f8sub.formats import ALL, Tile
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.scales import Sources
from f8sub.linear import sockets
from f8sub.recipe import OperandName, Recipe
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import constant_result, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

    from f8sub.linear.float8_linear import Float8Linear


class Named(Protocol):
    """A layer, for what errors say of it. No name alone: compiled code that reads one is compiled anew for each."""

    fqn: str


class Cut(NamedTuple):
    """How a matrix is cut over the ranks of a mesh of one dimension. ``across`` is a ``ReduceAmax``.

    Plain values, which ``torch.compile`` takes for constants.

    Attributes:
        dim: the dimension it is cut along.
        whole: its extent along that; 0 for tokens, whose parts follow each other in no order that tiles could have.
        part: that of all parts but the last ones.
        rank: this rank's place in the mesh.
        group: name of the mesh's process group.
    """

    dim: int
    whole: int
    part: int
    rank: int
    group: Any

    @classmethod
    def of(cls, mesh: "DeviceMesh", dim: int, whole: int) -> "Cut":
        """A matrix whose dimension of extent ``whole`` is cut by torch.chunk's rule; 0 for tokens."""
        part = -(-whole // mesh.size())
        return cls(dim, whole, part, mesh.get_local_rank(), mesh.get_group().group_name)

    def across(self, amax: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Amaxes of this rank's tiles to those of the whole matrix's, all of them on every rank alike."""
        edge = (tile.rows, tile.cols)[self.dim]
        if edge == ALL:
            return self._largest(amax)
        if not self.whole or self.part % edge == 0:
            return amax
        # Parts that lie within one tile.
        tiles = list(amax.shape)
        tiles[self.dim] = -(-self.whole // edge)
        first = min(self.rank * self.part, self.whole - 1) // edge
        whole = amax.new_zeros(tiles)
        whole.narrow(self.dim, first, amax.shape[self.dim]).copy_(amax)
        return self._largest(whole).narrow(self.dim, first, amax.shape[self.dim])

    def _largest(self, amax: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over the ranks; there is no NaN in it."""
        if torch.compiler.is_compiling():
            enter_graph_functions()
        return _all_reduce_max(amax, self.group)


@in_graph
def _all_reduce_max(amax: torch.Tensor, group: Any) -> torch.Tensor:
    collectives = torch.distributed._functional_collectives
    reduced = collectives.all_reduce(amax.contiguous(), "max", group)
    done: torch.Tensor = collectives.wait_tensor(reduced)
    save_when_checkpointed(torch.ops._c10d_functional.all_reduce.default)
    return done


Cuts = tuple[Cut | None, Cut | None, Cut | None]
"""Of x, w and dy, each as the matrix that is quantized; None where ranks need not know of each other."""


class Places(NamedTuple):
    """The placements of what a layer's forward and backward read and make, see the module's docstring.

    Attributes:
        mesh: of one dimension.
        shape: of y.
        x: of x; the others likewise.
    """

    mesh: "DeviceMesh"
    shape: tuple[int, ...]
    x: "Placement"
    y: "Placement"
    dx: "Placement"
    dw: "Placement"
    dbias: "Placement"

    @classmethod
    def of(cls, layer: Named, weight: "DTensor", x: torch.Tensor) -> "Places":
        """Those that follow from the weight's, and x's where the weight is whole.

        Raises:
            Float8ConfigError: an input that is no DTensor on the weight's mesh, or a weight that is cut by more than
                tensor parallelism on a mesh of one dimension.
        """
        mesh = weight.device_mesh
        if mesh.ndim != 1 or isinstance(weight._local_tensor, PrimaryWeight):
            raise Float8ConfigError(
                f"{layer.fqn}: its weight has placements {weight.placements} on {mesh} as "
                f"{type(weight._local_tensor).__name__}; float8 matmuls take weights on a tensor-parallel mesh of one "
                "dimension: call the layer through the module that fully_shard was called on, and take primary_weights "
                "with fully_shard alone"
            )
        if not is_dtensor(x) or x.device_mesh != mesh:
            raise Float8ConfigError(
                f"{layer.fqn}: its weight has placements {weight.placements} on {mesh}, and its input is "
                f"{f'on {x.device_mesh}' if is_dtensor(x) else 'no DTensor'}; give the layer a style in "
                "parallelize_module's plan, or call it inside the module that fully_shard was called on"
            )
        last, shape = x.dim() - 1, (*x.shape[:-1], weight.shape[0])
        (of_weight,), (of_x,) = weight.placements, x.placements
        placed = torch.distributed.tensor
        split, whole = placed.Shard(last), placed.Replicate()
        if of_weight.is_shard(0):
            return cls(mesh, shape, whole, split, placed.Partial(), placed.Shard(0), placed.Shard(0))
        if of_weight.is_shard(1):
            return cls(mesh, shape, split, placed.Partial(), split, placed.Shard(1), whole)
        if of_x.is_shard() and not of_x.is_shard(last):
            return cls(mesh, shape, of_x, of_x, of_x, placed.Partial(), placed.Partial())
        return cls(mesh, shape, whole, whole, whole, whole, whole)

    @property
    def adds_bias(self) -> bool:
        """Whether this rank's y has the bias in it, or in compiled code what ``local`` makes of it."""
        return not self.y.is_partial() or self.mesh.get_local_rank() == 0 or torch.compiler.is_compiling()

    def sources(
        self, layer: Named, plan: Plan, weight: "DTensor", x: torch.Tensor, sources: Sources
    ) -> Sources:
        """Those of a call with ``x``, whose amaxes are reduced over the ranks that a tile reaches over.

        Raises:
            Float8ConfigError: a recipe whose tiles the cuts go through, or an x in float8 that it does not read.
        """
        if is_dtensor(x) and isinstance(x._local_tensor, Float8Tensor):
            _check_received(layer.fqn, x._local_tensor, plan.recipe)
        x_cut, w_cut, dy_cut = (
            _reduced_cut(layer, plan, name, cut)
            for name, cut in zip(OPERANDS, self._cuts(weight), strict=True)
        )
        of_x, of_w, of_dy, _ = sources
        if x_cut is not None:
            of_x = of_x.over(x_cut.across)
        if w_cut is not None:
            compiling = torch.compiler.is_compiling()
            of_w = of_w.over(w_cut.across if compiling else _ReducedOnce(w_cut, []).across)
        if dy_cut is not None:
            of_dy = of_dy.over(dy_cut.across)
        return Sources(of_x, of_w, of_dy, distributed=True)

    def _cuts(self, weight: "DTensor") -> Cuts:
        mesh, (rows, cols) = self.mesh, weight.shape
        if mesh.size() == 1:
            return None, None, None
        if self.dw.is_shard(0):
            return None, Cut.of(mesh, 0, rows), Cut.of(mesh, 1, rows)
        if self.dw.is_shard(1):
            return Cut.of(mesh, 1, cols), Cut.of(mesh, 1, cols), None
        if self.x.is_shard():
            return Cut.of(mesh, 0, 0), None, Cut.of(mesh, 0, 0)
        return None, None, None

    def local(
        self, x: torch.Tensor, weight: "DTensor", bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """This rank's x, w and bias; x is sent around first where it lies otherwise than the weight needs it."""
        if not is_dtensor(x):
            raise RuntimeError("the input of a layer whose weight is a DTensor is one")
        if x.placements != (self.x,):
            x = x.redistribute(placements=(self.x,))
        if is_dtensor(bias):
            bias = bias.to_local(grad_placements=(self.dbias,))
        if bias is not None and self.y.is_partial() and torch.compiler.is_compiling():
            # Zero on all ranks but one, with all of the gradient: where graphs of ranks differ in more than a number, a
            # partitioner may repeat collectives in the backward of some, which then wait for ever.
            bias = bias - bias.detach() * float(self.mesh.get_local_rank() > 0)
        return x.to_local(grad_placements=(self.dx,)), weight.to_local(grad_placements=(self.dw,)), bias

    def whole(self, y: torch.Tensor) -> "DTensor":
        """The layer's output, of this rank's."""
        stride = torch.empty(self.shape, dtype=y.dtype, device="meta").stride()
        return torch.distributed.tensor.DTensor.from_local(
            y, self.mesh, (self.y,), run_check=False, shape=torch.Size(self.shape), stride=stride
        )


class _ReducedOnce(NamedTuple):
    """``Cut.across`` of a weight: backward casts with the amaxes that forward reduced."""

    cut: Cut
    found: list[torch.Tensor]

    def across(self, amax: torch.Tensor, tile: Tile) -> torch.Tensor:
        """See ``Cut.across``."""
        if not self.found:
            self.found.append(self.cut.across(amax, tile))
        return self.found[0]


def _check_received(fqn: str, x: Float8Tensor, recipe: Recipe) -> None:
    """Refuse an x in float8 that the recipe in use does not read.

    Raises:
        Float8ConfigError: it is one.
    """
    wanted, rowwise = recipe.fprop.a, x.rowwise
    if rowwise is None or rowwise.format != wanted:
        raise Float8ConfigError(
            f"{fqn}: its input came in float8 as {x!r}, and the recipe in use reads x as {wanted}; give "
            "the layers that share an input recipes that read it alike, and enter f8sub.autocast around the "
            "module whose style sends it"
        )


def _reduced_cut(layer: Named, plan: Plan, operand: OperandName, cut: Cut | None) -> Cut | None:
    """The cut of an operand whose scales reach over ranks; None for any other.

    Raises:
        Float8ConfigError: a cut that the operand's formats cannot take.
    """
    if cut is None:
        return None
    reaches = _reaches_over(plan.key, operand, *cut[:3])
    if isinstance(reaches, str):
        raise Float8ConfigError(f"{layer.fqn}: {reaches}")
    return cut if reaches else None


@constant_result
def _reaches_over(key: str, operand: OperandName, dim: int, whole: int, part: int) -> bool | str:
    """Whether scales of an operand that is cut so reach over ranks, or why it cannot be; of the plan of that key."""
    try:
        return _checked_cut(key, operand, dim, whole, part)
    except Float8ConfigError as error:
        return str(error)


@functools.cache
def _checked_cut(key: str, operand: OperandName, dim: int, whole: int, part: int) -> bool:
    recipe = Plan.made[key].recipe
    row, col = recipe.formats(operand)
    if operand == "w" and row is not None:
        col = None  # derived from this rank's codes
    seen = [] if row is None else [(row, row.tile)]
    seen += [] if col is None else [(col, col.tile.t())]
    for format, tile in seen:
        if format.scale_rule.has_global or format.depth_multiple > 1:
            raise Float8ConfigError(
                f"tensor parallelism cuts its {operand}, and recipe {recipe.name!r} reads it as {format}, whose "
                "scales or packing go over parts; convert the layer with a recipe of one scale level and one element a "
                "byte, or leave it out of parallelize_module's plan"
            )
        if whole:
            tile.check_cut(dim, whole, part, f"under tensor parallelism its {operand}")
    edges = [(tile.rows, tile.cols)[dim] for _, tile in seen]
    return any(edge == ALL or bool(whole and part % edge) for edge in edges)


def place(
    layer: "Float8Linear",
    plan: Plan,
    weight: "DTensor",
    x: torch.Tensor,
    bias: torch.Tensor | None,
    sources: Sources,
) -> sockets.Placed:
    """This rank's part of a forward.

    Raises:
        Float8ConfigError: amax histories that a style distributed; and see ``Places.of`` and ``Places.sources``.
    """
    if plan.recipe.delayed is not None and any(is_dtensor(state.scale) for state in states_of(layer)):
        raise Float8ConfigError(
            f"{layer.fqn}: its style in parallelize_module's plan distributed its amax histories; "
            "delayed scaling takes Float8ColwiseParallel and Float8RowwiseParallel of f8sub.tensor_parallel"
        )
    places = Places.of(layer, weight, x)
    of_parts = places.sources(layer, plan, weight, x, sources)
    return sockets.Placed(*places.local(x, weight, bias), places.adds_bias, of_parts, places.whole)


sockets.placement = place
