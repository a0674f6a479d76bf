"""Counts bytes: of float8 operands, of a step's collectives, and of GPU memory at the peak of a training step.

Operands are weights as they are sent and cached, and x as it is saved: the rules of an estimate, and of a conversion
report's account. Memory is weights, optimizer, codes, activations and logits. Of a model with a frozen base and
adapters it is bytes that learn, bytes that do not, and what backward reads. Adapters are PEFT's LoRA and DoRA, known
by the names of their layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from f8sub.convert.primary_weights import is_codes_alone
from f8sub.estimator.seconds import FULL, NONE, Run, last_of, repeats, wire_format
from f8sub.formats import ALL, bytes_of_row, lies_in_rows
from f8sub.kernels.grouped.gemm import TRITON_MULTIPLE
from f8sub.kernels.grouped.operands import aligned_rows, start_of_groups
from f8sub.linear.saved_input import FLOAT8, HIGH_PRECISION, RECOMPUTE

if TYPE_CHECKING:
    from f8sub.convert.products import Product, Shapes
    from f8sub.formats import Float8Format
    from f8sub.recipe import OperandName, Recipe

OPERANDS: tuple[OperandName, ...] = ("x", "w", "dy")


def operand_bytes(format: Float8Format, rows: int, depth: int) -> int:
    """Count codes and scales of a (rows, depth) operand, its depth padded as its GEMM needs it."""
    # What fills up the depth is stored, too.
    depth = -(-depth // format.depth_multiple) * format.depth_multiple
    tall, wide = format.tile.scale_shape((rows, depth))
    # The second level of scales: one float32 for the matrix.
    level = 4 if format.scale_rule.has_global else 0
    return rows * depth // format.codes_per_byte + tall * wide * format.scale_rule.stored_as.itemsize + level


def tokens_bytes(
    format: Float8Format, rows: int, cols: int, experts: int, multiple: int, *, contracted: bool
) -> int:
    """Count codes and scales of an operand that has a row for each token, x or dy; those of experts are in groups.

    Args:
        format: of the operand.
        rows: tokens, those of all experts together.
        cols: features.
        experts: groups of rows; 0 of a linear layer.
        multiple: groups begin at multiples of it; those with tiles of several rows at multiples of these.
        contracted: whether the product sums over the rows.
    """
    if not experts:
        return operand_bytes(format, *((cols, rows) if contracted else (rows, cols)))
    tile = format.tile.t() if contracted else format.tile
    # A tile belongs to one group, so groups begin where tiles do.
    start = start_of_groups(tile.rows, multiple)
    rows = rows if start == 1 else aligned_rows(rows, experts, start)
    down = experts if tile.rows == ALL else -(-rows // tile.rows)
    along = tile.scale_shape((1, cols))[1]
    return rows * cols // format.codes_per_byte + down * along * format.scale_rule.stored_as.itemsize


def sent_bytes(format: Float8Format, rows: int, cols: int) -> int:
    """Count what an all-gather fills with a whole weight (rows, cols): codes, and scales that stay in their rows."""
    return rows * bytes_of_row(format, cols, lies_in_rows(format.tile))


def amax_bytes(format: Float8Format, rows: int, cols: int) -> int:
    """Count what the all-reduce of amaxes has of a weight (rows, cols): nothing where scales stay in their rows."""
    # one float32 per tile
    return 0 if lies_in_rows(format.tile) else 4 * math.prod(format.tile.scale_shape((rows, cols)))


def saved_x_bytes(
    recipe: Recipe,
    rows: int,
    cols: int,
    plain: int,
    how: str = FLOAT8,
    *,
    experts: int = 0,
    multiple: int = 1,
) -> int:
    """Count what a converted layer saves of its x (rows, cols) for backward.

    Args:
        recipe: the layer's.
        rows: tokens.
        cols: K.
        plain: what x in high precision would add; 0 where something else saves it.
        how: "float8", "high_precision" or "recompute", see ``keep_x``.
        experts: groups of rows; 0 of a linear layer.
        multiple: see ``tokens_bytes``.
    """
    row, col = recipe.formats("x")
    if col is None or how == HIGH_PRECISION:
        return plain
    # The rowwise operand of fprop is saved, and the columnwise one computed from it in backward.
    if how == RECOMPUTE and row is not None:
        return tokens_bytes(row, rows, cols, experts, 1, contracted=False)
    # wgrad sums over tokens: it reads x as (K, tokens).
    return tokens_bytes(col, rows, cols, experts, multiple, contracted=True)


BF16, FLOAT32 = 2, 4


@dataclass(frozen=True, slots=True)
class Wire:
    """Holds the bytes that one GPU receives, or for reductions sends, in a step.

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
    """Count the bytes of ``fully_shard``, one group per block, resharded after forward; ``recipe`` None for bf16."""
    # A block is gathered for forward and again for backward.
    whole = shapes.other_parameters * BF16 + sum(
        gathered_bytes(product, recipe) * (1 if product.block is None else 2) for product in shapes.products
    )
    # The shard of the GPU itself does not travel.
    away = (run.shards - 1) / run.shards
    shard = shapes.learning / run.shards * FLOAT32
    return Wire(
        whole * away,
        shapes.learning * FLOAT32 * away,
        # A ring sends each byte once to reduce and once to gather.
        2 * shard * (run.replicas - 1) / run.replicas,
        sum(_amaxes(product, recipe) for product in shapes.products),
    )


def gathered_bytes(product: Product, recipe: Recipe | None) -> int:
    """Count the bytes that an all-gather fills with a whole weight, scales that stay in their rows included."""
    row = wire_format(product, recipe)
    if row is None or not product.elements:
        return product.elements * BF16
    return sent_bytes(row, *product.stored)


def _amaxes(product: Product, recipe: Recipe | None) -> int:
    row = wire_format(product, recipe)
    return 0 if row is None or not product.elements else amax_bytes(row, *product.stored)


FIRST, SECOND, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
"""What PEFT calls an adapter's two layers, and DoRA's magnitudes. Source: peft 0.21, ``tuners/lora/layer.py``."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Describes a model some of whose parameters are frozen while others learn.

    Attributes:
        learning: bytes of the parameters that learn.
        frozen: bytes of the others; one an element of weights that are codes alone.
        codes: names of the layers whose weights are codes alone.
        saved: bytes that adapters save for backward, for each token.
    """

    learning: int
    frozen: int
    codes: frozenset[str]
    saved: float


def adapters_of(model: torch.nn.Module, shapes: Shapes) -> Adapters | None:
    """Return the bytes of a model's adapters and base; None if no parameter is frozen, or all are."""
    parameters = dict(model.named_parameters())
    learning = sum(p.numel() * p.itemsize for p in parameters.values() if p.requires_grad)
    frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
    if not learning or not frozen:
        return None
    codes = frozenset(name.removesuffix(".weight") for name, p in frozen.items() if is_codes_alone(p))
    # Weights that are float8 data alone have 1 byte per element.
    held = sum(
        p.numel() * (1 if name.removesuffix(".weight") in codes else p.itemsize) for name, p in frozen.items()
    )
    return Adapters(learning, held, codes, _saved(model, shapes))


def _saved(model: torch.nn.Module, shapes: Shapes) -> float:
    """Count the bytes per token that adapters save: each one's x, in its dtype, and its first layer's result.

    Siblings save one x, unless each casts it or drops elements of it for itself. What attention made is saved anyway.
    DoRA saves the two results that it scales.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    bases = {product.fqn.removesuffix(".base_layer"): product for product in shapes.products}
    found = 0.0
    for product in shapes.products:
        owner, _, name = product.fqn.partition(f".{FIRST}.")
        base = bases.get(owner)
        if not name or base is None:
            continue
        size = modules[product.fqn].weight.itemsize
        # PEFT has an Identity where dropout is 0.
        drops = not isinstance(modules[f"{owner}.lora_dropout.{name}"], torch.nn.Identity)
        if drops or size != modules[base.fqn].weight.itemsize:
            # Its own copy of x, and 1 byte per element of the mask of dropout.
            found += product.cols * (size + drops)
        # Else x is the one that the base layer reads.
        elif not (base.shares_x or base.reads_attention):
            found += product.cols * size
        # The result of lora_A, which the gradient of lora_B reads.
        found += product.rows * size
        if name in modules[f"{owner}.{MAGNITUDE}"]:
            found += 2 * base.rows * size
    return found


EAGER_SAVES, LOGIT_BYTES, LOGIT_BYTES_EAGER, WORKSPACE = 0.88, 4, 10, 0.4e9
"""Bytes for each element of x and y that transformers' eager code saves besides, which a test counts: a norm 6 for each
of its elements, SwiGLU 2, less 4 of the residuals that a norm keeps in float32 instead; bytes of a logit at the peak,
compiled and eager; bytes of cuBLAS and of batches. The last three are fitted to the peaks of "The same blocks with
embeddings, head, loss and AdamW" and of "A whole step of 16 blocks, eager" in ``tests/estimator/measured.toml``."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one GPU at the peak of a step.

    Attributes:
        weights: high-precision weights.
        optimizer: two states of AdamW.
        codes: float8 codes of weights that are not sharded.
        activations: what blocks save for backward.
        transient: what one block or the head has at once, gradients included.
    """

    weights: float
    optimizer: float
    codes: float
    activations: float
    transient: float

    @property
    def total(self) -> float:
        """The sum, in bytes."""
        return sum(float(getattr(self, field.name)) for field in fields(self))


def memory(shapes: Shapes, recipe: Recipe | None, run: Run, adapters: Adapters | None = None) -> Memory:
    """Predict the bytes of a whole step with AdamW; the peak is where backward begins, or at the last block's end.

    With ``adapters`` over a frozen base the dtypes are those of the parameters, and only the adapters learn.
    """
    if adapters is not None:
        return _of_adapters(shapes, recipe, run, adapters)
    weights = shapes.parameters / run.shards * run.master_bytes
    blocks = list(shapes.blocks.values())
    saved = sum(saved_bytes(products, recipe, run) for products in blocks)
    logit = LOGIT_BYTES if run.compiled else LOGIT_BYTES_EAGER
    # While logits are there, so is the gathered head, 2 bytes per element.
    head = sum(product.elements for product in shapes.outside)
    at_logits = run.tokens * shapes.logits * logit + head * 2 * run.sharded
    codes = kept_codes(shapes, recipe, run)
    # All gradients, as large as the weights, are there at the end of backward.
    at_end = weights + max((in_backward_bytes(products, recipe, run) for products in blocks), default=0.0)
    transient = max(at_logits, at_end - saved - codes)
    # Both states of AdamW are as large as the weights.
    return Memory(weights, 2 * weights, codes, saved, transient + WORKSPACE)


def _of_adapters(shapes: Shapes, recipe: Recipe | None, run: Run, adapters: Adapters) -> Memory:
    """Predict the bytes over a frozen base, whose layers save no x and have no gradient.

    Adapters save theirs, if their block is not checkpointed.
    """
    learning, frozen = adapters.learning / run.shards, adapters.frozen / run.shards
    products = [p for p in shapes.products if f".{FIRST}." not in p.fqn and f".{SECOND}." not in p.fqn]
    base = replace(shapes, products=tuple(products))
    blocks = list(base.blocks.values())
    if run.checkpoint == NONE:
        saved = run.tokens * adapters.saved + sum(frozen_bytes(block, run) for block in blocks)
        again = 0.0
    else:
        saved = sum(saved_bytes(block, recipe, run) for block in blocks)
        # Backward repeats one block at a time.
        again = run.tokens * adapters.saved / max(len(blocks), 1)
    cast = [p for p in products if p.reason is None and p.fqn not in adapters.codes]
    codes = kept_codes(replace(base, products=tuple(cast)), recipe, run)
    logit = LOGIT_BYTES if run.compiled else LOGIT_BYTES_EAGER
    times = 2 * run.sharded
    of_block = max(
        (frozen_bytes(b, run) + times * sum(gathered_bytes(p, recipe) for p in b) for b in blocks),
        default=0.0,
    )
    transient = max(run.tokens * shapes.logits * logit, of_block + again)
    return Memory(learning + frozen, 2 * learning, codes, saved, learning + transient + WORKSPACE)


def frozen_bytes(products: Sequence[Product], run: Run) -> float:
    """Count the bytes that a block of frozen layers saves: y, or as many of what is computed from it; no x."""
    made = 0.0
    for product in products:
        rows = run.tokens * product.uses
        # y in bf16
        made += (2 + eager_saves(run)) * rows * product.rows
        made += 2 * rows * product.cols if product.reads_attention else 0
    return made


def kept_codes(shapes: Shapes, recipe: Recipe | None, run: Run) -> float:
    """Count the bytes of float8 data of converted weights; 0 if sharded, as FSDP2 gathers into its own memory."""
    if recipe is None or run.sharded:
        return 0.0
    row = recipe.formats("w")[0]
    converted = [p for p in shapes.products if p.reason is None and p.elements]
    return 0.0 if row is None else sum(operand_bytes(row, *product.stored) for product in converted)


def saved_bytes(products: Sequence[Product], recipe: Recipe | None, run: Run) -> float:
    """Count the bytes that one block saves for backward.

    Without checkpointing each x of a layer, as codes where wgrad reads those, and each y, or as many bytes of the
    residuals that it is added to. A checkpointed block saves its input and attention's result, and y of what it does
    not repeat.
    """
    if run.checkpoint == NONE:
        return sum(_own_bytes(product, recipe, run) for product in products)
    # the input of the block, [tokens, hidden] in bf16
    entered = 2.0 * run.tokens * (products[0].cols if products else 0)
    if run.checkpoint == FULL:
        return entered
    again = repeats(products, run)
    again[last_of(products)] = True  # its y is summed into the next block's input, which is counted there
    made = sum(2 * run.tokens * p.uses * p.rows for p, r in zip(products, again, strict=True) if not r)
    # results of attention in bf16
    scores = sum(2 * run.tokens * product.cols for product in products if product.reads_attention)
    return entered + made + scores


def _own_bytes(product: Product, recipe: Recipe | None, run: Run) -> float:
    rows = run.tokens * product.uses
    x = 0.0 if product.shares_x else rows * product.cols
    saved = 2 * x
    if recipe is not None and product.reason is None and x:
        # Attention saves its result anyway: in high precision x adds nothing.
        how = HIGH_PRECISION if product.reads_attention else FLOAT8
        groups = {"experts": product.experts, "multiple": TRITON_MULTIPLE}
        saved = saved_x_bytes(recipe, round(rows), product.cols, round(saved), how, **groups)
    y = rows * product.rows
    return saved + 2 * y + eager_saves(run) * (x + y)


def eager_saves(run: Run) -> float:
    """Return the further bytes saved per element of x and y; 0 if kernels of norms and SwiGLU save only their input."""
    return 0.0 if run.compiled or run.kernels else EAGER_SAVES


def in_backward_bytes(products: Sequence[Product], recipe: Recipe | None, run: Run) -> float:
    """Count the bytes of a block in backward: saved or recomputed tensors, gathered weights, unreduced gradients.

    The block is the last one of backward, when no block is left to prefetch.
    """
    made_again = sum(_own_bytes(product, recipe, run) for product in products)
    elements = sum(product.elements for product in products)
    gathered = sum(gathered_bytes(product, recipe) for product in products)
    # A gradient is 2 bytes per element in bf16, and 4 in the float32 buffer of its reduction.
    return made_again + (gathered + 6 * elements) * run.sharded
