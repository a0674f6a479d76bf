"""What a model multiplies by, read off its modules: shapes, what shares an x, blocks, and what would be converted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from f8sub.convert.checks import SKIP_REASON
from f8sub.convert.filters import Selection, layer_recipes
from f8sub.features.defaults.defaults import HEAD, default_reasons
from f8sub.features.keep_x.keep_x import layer_keep_x
from f8sub.features.layer_kinds.layer_kinds import kind_of
from f8sub.features.report.other_weights import active_share, active_share_of_linear, other_weights
from f8sub.features.tools.byte_account import SAVED_INPUTS, SHARED_INPUTS
from f8sub.linear.float8_linear import Float8Linear
from f8sub.recipes import DEFAULT

ATTENTION_OUTPUTS = ("out_proj", "c_proj", "proj", "dense")
"""Names of layers that read what attention makes, besides ``SAVED_INPUTS``, in modules called attn or attention."""


HEAD_SIZE = 128
"""Features of an attention head where a module does not tell: those of Llama 3, whose attention was timed."""


@dataclass(frozen=True, slots=True)
class Product:
    """A weight, or several of one shape in one module, and what multiplies by it.

    Attributes:
        fqn: the module's name.
        rows: N.
        cols: K.
        uses: how many (N, K) matrices of it one token is multiplied by: 1 of a layer, fewer of one expert.
        elements: how many the weight has.
        reason: why it is not converted; None where it is.
        reads: the first of the siblings that read its x, by name; itself where no other does.
        reads_attention: whether its x is what attention made.
        block: the name of the numbered block that it is in; None outside of blocks.
        head: features of an attention head, where its x is what attention made.
    """

    fqn: str
    rows: int
    cols: int
    uses: float
    elements: int
    reason: str | None
    reads: str
    reads_attention: bool
    block: str | None
    head: int = HEAD_SIZE

    @property
    def shares_x(self) -> bool:
        """Whether a sibling before it reads the same x."""
        return self.reads != self.fqn

    @property
    def multiplications(self) -> float:
        """Of one token."""
        return self.rows * self.cols * self.uses


@dataclass(frozen=True, slots=True)
class Shapes:
    """A model.

    Attributes:
        products: all that it multiplies by, in its order.
        other_parameters: elements of embeddings, norms and biases.
        logits: of a token, of all output heads.
        not_counted: classes whose work depends on more than tokens, such as convolutions.
    """

    products: tuple[Product, ...]
    other_parameters: int
    logits: int
    not_counted: tuple[str, ...]

    @property
    def blocks(self) -> dict[str, list[Product]]:
        """The products of each numbered block, by its name."""
        found: dict[str, list[Product]] = {}
        for product in self.products:
            if product.block is not None:
                found.setdefault(product.block, []).append(product)
        return found

    @property
    def outside(self) -> list[Product]:
        """The products outside of numbered blocks."""
        return [product for product in self.products if product.block is None]

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self.other_parameters + sum(product.elements for product in self.products)


def shapes_of(model: torch.nn.Module, skip: Sequence[str] = ()) -> Shapes:
    """Read a model, converted or not, on any device; it is not changed.

    Args:
        model: of one that is not converted, told is what ``convert_to_float8(model, skip=skip)`` would convert.
        skip: glob patterns.
    """
    modules = dict(model.named_modules())
    linears = {fqn: m for fqn, m in modules.items() if isinstance(m, torch.nn.Linear)}
    if any(isinstance(m, Float8Linear) for m in linears.values()):
        reasons: dict[str, str | None] = {
            fqn: None if isinstance(m, Float8Linear) else getattr(m, SKIP_REASON, "not converted")
            for fqn, m in linears.items()
        }
    else:
        selection = Selection(layer_recipes(DEFAULT), layer_keep_x("auto"), skip=skip)
        reasons = selection.reasons(modules, linears)
    groups = {name: group for group in SHARED_INPUTS for name in group}
    heads = {fqn for fqn, reason in default_reasons(modules, linears).items() if reason == HEAD}
    first: dict[tuple[str, tuple[str, ...]], str] = {}
    products, seen = [], set()
    for fqn, layer in linears.items():
        layer_name = fqn.removesuffix(".base_layer")  # which PEFT puts under an adapter
        parent, _, name = layer_name.rpartition(".")
        elements = 0 if layer.weight in seen else layer.weight.numel()
        seen.add(layer.weight)
        uses, reads = (
            active_share_of_linear(model, fqn),
            first.setdefault((parent, groups.get(name, (name,))), fqn),
        )
        sizes = layer.out_features, layer.in_features, uses, elements
        head = getattr(modules.get(parent), "head_dim", None)
        places = reasons[fqn], reads, reads_attention(layer_name), block_of(fqn)
        products.append(Product(fqn, *sizes, *places, head if isinstance(head, int) else HEAD_SIZE))
    others, not_counted = _others(model)
    products += others
    counted = sum(product.elements for product in products)
    logits = sum(linears[fqn].out_features for fqn in heads)
    total = sum(p.numel() for p in model.parameters())
    return Shapes(tuple(products), total - counted, logits, not_counted)


def reads_attention(fqn: str) -> bool:
    """Whether a layer's x is what attention made, told by its name."""
    *parents, name = fqn.split(".")
    own = any(word in part for part in parents for word in ("attn", "attention"))
    return name in SAVED_INPUTS or (own and name in ATTENTION_OUTPUTS)


def block_of(fqn: str) -> str | None:
    """``model.layers.3`` of ``model.layers.3.mlp.up_proj``."""
    parts = fqn.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


def _others(model: torch.nn.Module) -> tuple[list[Product], tuple[str, ...]]:
    """Experts, attention of torch, Conv1D and routers; and the classes of what cannot be counted."""
    found: list[Product] = []
    not_counted: dict[str, None] = {}
    for other in other_weights(model):
        if other.multiplications is None:
            not_counted[other.detail.partition(":")[0]] = None
            continue
        for shape in other.shapes:
            experts = shape[0] if len(shape) == 3 else 1
            share = (active_share(model, other.fqn, experts) or 1.0) if len(shape) == 3 else 1.0
            rows, cols = shape[-2:]
            sizes = rows, cols, experts * share, math.prod(shape)
            places = other.detail, other.fqn, reads_attention(other.fqn), block_of(other.fqn)
            found.append(Product(other.fqn, *sizes, *places))
    return found, tuple(not_counted)


def alike(products: Sequence[Product]) -> dict[tuple[str, int, int, str | None], list[Product]]:
    """Products of one kind, shape and reason, by those."""
    found: dict[tuple[str, int, int, str | None], list[Product]] = {}
    for product in products:
        key = kind_of(product.fqn), product.rows, product.cols, product.reason
        found.setdefault(key, []).append(product)
    return found
