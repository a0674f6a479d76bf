"""What one group of FSDP2, a block or what is outside of blocks, computes, gathers and reduces."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from f8sub.estimator import seconds
from f8sub.estimator.cluster import (
    BF16,
    E4M3,
    E4M3_FLAT,
    FLOAT32,
    REDUCTIONS,
    Cluster,
)
from f8sub.estimator.seconds import NONE, Run, Seconds
from f8sub.estimator.shapes import Product, Shapes
from f8sub.recipe import Recipe

COPY_IN = {FLOAT32: 12.0, BF16: 5.5, E4M3: 3.1, E4M3_FLAT: 3.1}
"""Bytes of a copy's speed that an element takes into FSDP2's buffer, or as codes into f8sub's: an H200 took 745 and 314
us for the 218 M elements of a Llama 3 8B layer, an H100 226 us, as ``scripts/bench/gradients.py`` measures it."""

ADD = 1.07
"""By how much a copy of the sum's bytes is faster: 903, 463 and 340 us of 856 M elements from 2, 8 and 64 ranks."""

FORWARD = 1 / 3
"""Share of casts and of elementwise work that is forward's."""

HIDDEN_GATHER, HIDDEN_REDUCTION = 0.115, 0.4
"""Seconds that a second of a collective within a host adds to what runs beside it: it takes multiprocessors and memory
bandwidth. As in ``f8sub.estimator.seconds``, by bytes; a sum in a reduce-scatter takes most."""

SKEW = 0.05
"""Share of compute by which ranks that share weights wait for the slowest one; with the two above it makes the whole
runs on two GPUs."""

OWN_SCALE = 1e-4
"""Seconds of the kernels before and after the all-reduce of one weight's amax."""

TP_COLLECTIVES = 4
"""Collectives of activations of a block's forward under tensor parallelism, two before and two behind products."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train.

    Attributes:
        recipe: None for bf16.
        gathers: whether weights are gathered as codes.
        scales_by_weight: whether each weight's amax has an all-reduce of its own before its gather.
        reduction: one of ``REDUCTIONS``.
    """

    recipe: Recipe | None = None
    gathers: bool = True
    scales_by_weight: bool = False
    reduction: str = FLOAT32


@dataclass(frozen=True, slots=True)
class Group:
    """Seconds of one group.

    Attributes:
        forward: compute, FSDP2's copies included.
        backward: the same.
        gather: one all-gather.
        reduce: the reduce-scatter, or the exchange.
        replicate: the all-reduce over replicas.
        gather_tax: what the all-gather adds to compute beside it.
        reduce_tax: the same of the reduction.
    """

    forward: float
    backward: float
    gather: float
    reduce: float
    replicate: float
    gather_tax: float
    reduce_tax: float


def group_of(products: Sequence[Product], arm: Arm, cluster: Cluster, run: Run, *, outside: bool) -> Group:
    """Of products that were divided by tensor parallelism before; ``outside`` of blocks nothing is gathered twice."""
    if cluster.shards == 1 and arm.reduction in (E4M3, E4M3_FLAT):
        arm = replace(arm, reduction=FLOAT32)  # f8sub leaves what one rank has alone
    gpu, recipe = cluster.gpu, arm.recipe
    on_wire = recipe if arm.gathers else None
    compute = computed(products, arm, cluster, run, outside) * (1 + SKEW * (cluster.shards > 1))
    first = forward_of(products, recipe, cluster, run, compute)
    copies = seconds.wire_seconds(products, on_wire, gpu, run, passes=1 if outside else 2).copies
    whole = sum(product.elements for product in products if not product.frozen)
    copies += whole * (COPY_IN[arm.reduction] - seconds.COPY_IN) / gpu.copy
    code = sum(product.elements * seconds.code_bytes(product, on_wire) for product in products)
    copy_out = 2 * code / gpu.copy
    gather = cluster.ring(code)
    if arm.scales_by_weight:
        scaled = sum(seconds.wire_format(product, on_wire) is not None for product in products)
        gather += scaled * (OWN_SCALE + cluster.latency)
    reduce, reduce_tax = reduction_of(whole, arm, cluster)
    return Group(
        forward=first + copy_out,
        backward=compute - first + copies - copy_out,
        gather=gather,
        reduce=reduce,
        replicate=cluster.all_reduce(4 * whole / cluster.shards),
        gather_tax=hidden(HIDDEN_GATHER, code, cluster),
        reduce_tax=reduce_tax,
    )


def computed(products: Sequence[Product], arm: Arm, cluster: Cluster, run: Run, outside: bool) -> float:
    """Seconds of products, casts, attention and elementwise work, and of tensor parallelism's collectives."""
    gathered = arm.gathers or arm.recipe is None
    if outside:
        own = cluster.gpu, replace(run, checkpoint=NONE), False, gathered
        return sum((seconds.linear_seconds(p, arm.recipe, *own) for p in products), Seconds()).total
    found = seconds.block_seconds(products, arm.recipe, cluster.gpu, replace(run, sharded=gathered))
    compute = found.gemms + found.casts + found.attention + found.elementwise
    return compute + tensor_parallel_seconds(products, cluster, run)


def tensor_parallel_seconds(products: Sequence[Product], cluster: Cluster, run: Run) -> float:
    """All-gathers and reduce-scatters of activations in bfloat16, which nothing hides."""
    if cluster.parts == 1 or not products:
        return 0.0
    size = 2 * run.tokens * products[0].cols * (cluster.parts - 1) / cluster.parts
    passes = 3 if run.checkpoint != NONE else 2
    return passes * TP_COLLECTIVES * size / cluster.link


def forward_of(
    products: Sequence[Product], recipe: Recipe | None, cluster: Cluster, run: Run, compute: float
) -> float:
    """Forward's share of ``compute``: its products, and a part of all else."""
    gemms = sum(seconds.fprop_seconds(product, recipe, run, cluster.gpu) for product in products)
    return gemms + FORWARD * max(0.0, compute - 3 * gemms) / (1 + seconds.REPEATED_ELEMENTWISE)


def reduction_of(elements: float, arm: Arm, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the reduction of a group's gradients, and what it adds to compute."""
    size = elements * REDUCTIONS[arm.reduction]
    if arm.reduction in (FLOAT32, BF16):
        return cluster.ring(size), hidden(HIDDEN_REDUCTION, size, cluster)
    flat = arm.reduction == E4M3_FLAT
    adding = elements * (1 + 4 / cluster.shards) * ADD / cluster.gpu.copy
    tax = adding + hidden(HIDDEN_GATHER, size, cluster)
    if cluster.hosts > 1 and cluster.neighbours > 1 and not flat:
        tax += HIDDEN_GATHER * 2 * elements / cluster.link
    return cluster.exchange(elements, flat) + adding, tax


def hidden(share: float, size: float, cluster: Cluster) -> float:
    """What a collective of so many bytes in all adds to compute that hides it, by what passes through a GPU."""
    return share * size * (cluster.shards - 1) / cluster.shards / cluster.link


def divided(shapes: Shapes, parts: int) -> Shapes:
    """What one of ``parts`` GPUs has of a model under tensor parallelism.

    In a block, layers that read attention or are the last have their columns divided, others their rows.
    """
    if parts == 1:
        return shapes
    found = []
    last = {products[seconds.last_of(products)].fqn for products in shapes.blocks.values()}
    for product in shapes.products:
        part = replace(product, elements=product.elements // parts)
        edge = "cols" if product.reads_attention or product.fqn in last else "rows"
        found.append(replace(part, **{edge: getattr(product, edge) // parts}))
    whole = shapes.other_parameters, shapes.logits, shapes.other_frozen
    other, logits, fixed = (count // parts for count in whole)
    return Shapes(tuple(found), other, logits, shapes.not_counted, other_frozen=fixed)
