"""Tensor parallelism: one layer's three GEMMs spread over ranks that have a part of its weight each.

| w         | x         | y         | dy        | dx        | dw        | bias                     |
| --------- | --------- | --------- | --------- | --------- | --------- | ------------------------ |
| Shard(0)  | whole     | Shard(-1) | Shard(-1) | Partial   | Shard(0)  | Shard(0)                 |
| Shard(1)  | Shard(-1) | Partial   | whole     | Shard(-1) | Shard(1)  | whole; rank 0 adds it    |
| whole     | whole     | whole     | whole     | whole     | whole     | whole                    |
| whole     | of tokens | of tokens | of tokens | of tokens | Partial   | whole; its grad: Partial |

GEMMs are of local matrices, and so are the scales of x and dy: no rank reads codes that another one cast, so their
amaxes are not reduced, and a finer scale rounds no worse. Scales of w are those of the whole weight, whatever
the number of ranks, because it is gathered with them: where it is gathered in high precision and a tile reaches over
ranks, one all-reduce makes them. The column scales that a re-encoded weight gets (see ``reference.derive_columnwise``)
are of the rank's own part again.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from f8sub.delayed.state import places_of, states_of
from f8sub.errors import Float8ConfigError
from f8sub.formats import ALL, Tile
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.graph_ops import enter_graph_functions, in_graph, save_when_checkpointed
from f8sub.kernels.scales import Sources
from f8sub.recipe import Recipe
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import all_reduce_node, constant_result, is_dtensor, largest_over_ranks
from f8sub.weights.primary_weight import PrimaryWeight

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
        # A tile spans the dimension that is cut, so it is of all ranks.
        if edge == ALL:
            return self._largest(amax)
        # Each rank has whole tiles.
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
    done = largest_over_ranks(amax, group)
    save_when_checkpointed(all_reduce_node)
    return done


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
        """Return the placements that follow from the weight's, and from x's where the weight is whole.

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
        # Column-wise: each rank makes some columns of y from all of x.
        if of_weight.is_shard(0):
            return cls(mesh, shape, whole, split, placed.Partial(), placed.Shard(0), placed.Shard(0))
        # Row-wise: each rank sums over its part of K, and y is the sum over the ranks.
        if of_weight.is_shard(1):
            return cls(mesh, shape, split, placed.Partial(), split, placed.Shard(1), whole)
        # The weight is whole, and each rank has tokens of its own.
        if of_x.is_shard() and not of_x.is_shard(last):
            return cls(mesh, shape, of_x, of_x, of_x, placed.Partial(), placed.Partial())
        return cls(mesh, shape, whole, whole, whole, whole, whole)

    @property
    def adds_bias(self) -> bool:
        """True if this rank's y has the bias in it, or in compiled code what ``local`` makes of it."""
        return not self.y.is_partial() or self.mesh.get_local_rank() == 0 or torch.compiler.is_compiling()

    def sources(
        self, layer: Named, plan: Plan, weight: "DTensor", x: torch.Tensor, sources: Sources
    ) -> Sources:
        """Return the sources of a call with ``x``.

        The weight's amaxes are reduced over the ranks that a tile reaches over.

        Raises:
            Float8ConfigError: a recipe whose tiles the cuts go through, or an x in float8 that it does not read.
        """
        if is_dtensor(x) and isinstance(x._local_tensor, Float8Tensor):
            _check_received(layer.fqn, x._local_tensor, plan.recipe)
        cut, of_w = self._cut_of(weight), sources.w
        if cut is not None and _reaches_over_ranks(layer, plan, cut):
            # Eager code keeps for backward what forward reduced; compiled code has it saved in the graph.
            of_w = of_w.over(cut.across if torch.compiler.is_compiling() else _ReducedOnce(cut, []).across)
        return sources._replace(w=of_w, distributed=True)

    def _cut_of(self, weight: "DTensor") -> Cut | None:
        """How the weight is cut; None where it is whole."""
        if self.mesh.size() == 1 or not self.dw.is_shard():
            return None
        dim = 0 if self.dw.is_shard(0) else 1
        return Cut.of(self.mesh, dim, weight.shape[dim])

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
        # Gradients are placed as backward's GEMMs make them: no collective is added here.
        return x.to_local(grad_placements=(self.dx,)), weight.to_local(grad_placements=(self.dw,)), bias

    def whole(self, y: torch.Tensor) -> "DTensor":
        """The layer's output, of this rank's."""
        # Given, because DTensor would infer the whole shape from this rank's part, as if all parts were as large.
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
            "the layers that share an input recipes that read it the same way, and enter f8sub.autocast around the "
            "module whose style sends it"
        )


def _reaches_over_ranks(layer: Named, plan: Plan, cut: Cut) -> bool:
    """Return whether scales of a weight that is cut so reach over ranks.

    Raises:
        Float8ConfigError: a cut that the weight's formats cannot take.
    """
    reaches = _reaches_over(plan.key, *cut[:3])
    if isinstance(reaches, str):
        raise Float8ConfigError(f"{layer.fqn}: {reaches}")
    return reaches


@constant_result
def _reaches_over(key: str, dim: int, whole: int, part: int) -> bool | str:
    """``_reaches_over_ranks`` of the plan of that key, or why the weight cannot be cut so."""
    try:
        return _checked_cut(key, dim, whole, part)
    except Float8ConfigError as error:
        return str(error)


@functools.cache
def _checked_cut(key: str, dim: int, whole: int, part: int) -> bool:
    recipe: Recipe = Plan.made[key].recipe
    row, col = recipe.formats("w")
    format = row or col
    if format is None:
        return False
    if format.scale_rule.has_global or format.depth_multiple > 1:
        raise Float8ConfigError(
            f"tensor parallelism cuts its w, and recipe {recipe.name!r} reads it as {format}, whose scales or packing "
            "go over parts; convert the layer with a recipe of one scale level and one element a byte, or leave it out "
            "of parallelize_module's plan"
        )
    tile = format.tile if row is not None else format.tile.t()
    tile.check_cut(dim, whole, part, "under tensor parallelism its w")
    edge = (tile.rows, tile.cols)[dim]
    return edge == ALL or part % edge != 0


class Placed(NamedTuple):
    """This rank's part of a forward whose weight is a DTensor.

    Attributes:
        x: the local matrix; ``weight`` and ``bias`` likewise.
        adds_bias: whether this rank adds the bias.
        sources: those of the call, with amaxes that are reduced over the ranks that a tile reaches over.
        whole: makes the DTensor that a local ``y`` is a part of.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    adds_bias: bool
    sources: Sources
    whole: Callable[[torch.Tensor], torch.Tensor]


def place(
    layer: "Float8Linear",
    plan: Plan,
    weight: "DTensor",
    x: torch.Tensor,
    bias: torch.Tensor | None,
    sources: Sources,
) -> Placed:
    """This rank's part of a forward.

    Raises:
        Float8ConfigError: amax histories that a style distributed; and see ``Places.of`` and ``Places.sources``.
    """
    if plan.recipe.delayed is not None and any(is_dtensor(state.scale) for state in states_of(layer)):
        raise Float8ConfigError(
            f"{layer._f8sub.fqn}: its style in parallelize_module's plan distributed its amax histories; "
            "delayed scaling takes Float8ColwiseParallel and Float8RowwiseParallel of f8sub.tensor_parallel"
        )
    places = Places.of(layer._f8sub, weight, x)
    of_parts = places.sources(layer._f8sub, plan, weight, x, sources)
    return Placed(*places.local(x, weight, bias), places.adds_bias, of_parts, places.whole)


@contextlib.contextmanager
def histories_left_alone(layer: torch.nn.Module) -> Iterator[None]:
    """Hide a layer's histories: torch's styles take every module in a linear layer for one, and shard its buffers."""
    # Taken out while the style runs, and put back as it was.
    states = {place: layer._modules.pop(place) for place in places_of(layer)}
    try:
        yield
    finally:
        layer._modules.update(states)
