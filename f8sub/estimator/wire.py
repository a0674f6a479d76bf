"""Bytes that a training step's collectives carry, on each GPU."""

import math
from dataclasses import dataclass

from f8sub.estimator.seconds import Run, wire_format
from f8sub.estimator.shapes import Product, Shapes
from f8sub.recipe import Recipe
from f8sub.weights.layout import bytes_of_row, lies_in_rows

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
    """Of ``fully_shard``, a block a group, resharded after forward; ``recipe`` None for bf16."""
    whole = shapes.other_parameters * BF16 + sum(
        _gathered(product, recipe) * (1 if product.block is None else 2) for product in shapes.products
    )
    away = (run.shards - 1) / run.shards
    shard = shapes.learning / run.shards * FLOAT32
    return Wire(
        whole * away,
        shapes.learning * FLOAT32 * away,
        2 * shard * (run.replicas - 1) / run.replicas,
        sum(_amaxes(product, recipe) for product in shapes.products),
    )


def _gathered(product: Product, recipe: Recipe | None) -> float:
    row = wire_format(product, recipe)
    if row is None or not product.elements:
        return product.elements * BF16
    rows, cols = product.stored
    return rows * bytes_of_row(row, cols, lies_in_rows(row.tile))


def _amaxes(product: Product, recipe: Recipe | None) -> float:
    row = wire_format(product, recipe)
    if row is None or not product.elements or lies_in_rows(row.tile):
        return 0.0
    return FLOAT32 * math.prod(row.tile.scale_shape(product.stored))
