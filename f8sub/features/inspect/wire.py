"""Bytes that a training step's collectives carry, on each GPU."""

from dataclasses import dataclass

from f8sub.features.estimate.layers import Product, Shapes
from f8sub.features.estimate.seconds import Run
from f8sub.recipe import Recipe
from f8sub.weights.layout import bytes_on_the_wire
from f8sub.weights.record import lies_in_rows

BF16, FLOAT32 = 2, 4


@dataclass(frozen=True, slots=True)
class Wire:
    """Bytes that one GPU receives, or for reductions sends, in a step.

    Attributes:
        gathered: all-gathers of weights; of a block two, forward's and backward's.
        reduced: reduce-scatters of gradients, in float32.
        replicated: all-reduces of gradients over copies of the weights.
        amaxes: the one all-reduce of amaxes: the size of its table.
    """

    gathered: float
    reduced: float
    replicated: float
    amaxes: float


def wire(shapes: Shapes, recipe: Recipe | None, run: Run) -> Wire:
    """Of ``fully_shard``, a block a group, resharded after forward.

    Args:
        shapes: the model.
        recipe: None for bf16.
        run: its mesh.
    """
    others = shapes.other_parameters
    whole = others * BF16 + sum(
        _gathered(product, recipe) * (1 if product.block is None else 2) for product in shapes.products
    )
    away = (run.shards - 1) / run.shards
    shard = shapes.parameters / run.shards * FLOAT32
    return Wire(
        whole * away,
        shapes.parameters * FLOAT32 * away,
        2 * shard * (run.replicas - 1) / run.replicas,
        sum(_amaxes(product, recipe) for product in shapes.products),
    )


def _in_float8(product: Product, recipe: Recipe | None) -> bool:
    return recipe is not None and product.reason is None and None not in recipe.formats("w")


def _gathered(product: Product, recipe: Recipe | None) -> float:
    row = None if recipe is None else recipe.formats("w")[0]
    if row is None or not _in_float8(product, recipe) or not product.elements:
        return product.elements * BF16
    return bytes_on_the_wire(row, (product.rows, product.cols))


def _amaxes(product: Product, recipe: Recipe | None) -> float:
    row = None if recipe is None else recipe.formats("w")[0]
    if row is None or not _in_float8(product, recipe) or lies_in_rows(row.tile) or not product.elements:
        return 0.0
    down, across = row.tile.scale_shape((product.rows, product.cols))
    return FLOAT32 * down * across
