"""Reads a model's products off its modules: shapes, what shares an x, blocks, and what would be converted."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from f8sub.convert.checks import SKIP_REASON, is_converted
from f8sub.convert.class_swap import EXPERTS
from f8sub.convert.convert import other_reasons
from f8sub.convert.defaults import HEAD, default_reasons
from f8sub.convert.filters import Selection, idle_patterns, kind_of, layer_recipes
from f8sub.convert.keep_x import layer_keep_x
from f8sub.convert.other_weights import (
    ROOT,
    active_share,
    active_share_of_linear,
    other_weights,
)
from f8sub.errors import Float8Warning
from f8sub.estimator.counted_forward import count_of_made_up
from f8sub.experts.seams import AUTO_EXPERTS, refuse_unknown_experts, seam_of
from f8sub.recipes import DEFAULT

ATTENTION_OUTPUTS = ("out_proj", "c_proj", "proj", "dense")
"""Names of layers that read what attention makes, besides ``SAVED_INPUTS``, in modules called attn or attention."""


SHARED_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("wq", "wk", "wv"),
    ("w1", "w3"),
    ("q", "k", "v"),
    ("gate", "up"),
)
"""Names of siblings that read one x: those of Llama in transformers and torchtitan, and their short forms."""

SAVED_INPUTS = ("o_proj", "wo", "o")
"""Names of layers whose x is saved anyway by what makes it: attention's results."""

_GROUPS = {name: group for group in SHARED_INPUTS for name in group}

HEAD_SIZE = 128
"""Features of an attention head where a module does not tell: those of Llama 3, whose attention was timed."""


@dataclass(frozen=True, slots=True)
class Product:
    """Describes a weight, and how much multiplies by it.

    Attributes:
        fqn: the module's name; of a weight of experts that weight's.
        rows: N.
        cols: K.
        uses: how many (N, K) matrices of it one token is multiplied by: 1 of a layer, fewer of one expert.
        elements: how many the weight has.
        reason: why it is not converted; None where it is.
        reads: the first of the siblings that read its x, by name; itself where no other does.
        reads_attention: whether its x is what attention made.
        block: the name of the numbered block that it is in; None outside of blocks.
        head: features of an attention head, where its x is what attention made.
        experts: how many (N, K) matrices the weight has, each for tokens of its own; 0 of a layer.
        transposed: whether such a weight is stored as (experts, K, N).
        frozen: whether it takes no gradient, while others do.
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
    experts: int = 0
    transposed: bool = False
    frozen: bool = False

    @property
    def module(self) -> str:
        """The name of the module that has the weight."""
        return self.fqn.rpartition(".")[0] if self.experts else self.fqn

    @property
    def stored(self) -> tuple[int, int]:
        """Rows and columns of the weight as it is stored, those of all experts as one matrix."""
        rows, cols = (self.cols, self.rows) if self.transposed else (self.rows, self.cols)
        return rows * max(1, self.experts), cols

    @property
    def shares_x(self) -> bool:
        """True if a sibling before it reads the same x."""
        return self.reads != self.fqn

    @property
    def multiplications(self) -> float:
        """Multiplications of one token."""
        return self.rows * self.cols * self.uses


@dataclass(frozen=True, slots=True)
class Shapes:
    """Holds the shapes of a model.

    Attributes:
        products: all that it multiplies by, in its order.
        other_parameters: elements of embeddings, norms and biases.
        logits: of a token, of all output heads.
        not_counted: classes whose work depends on more than tokens, such as convolutions.
        undecided: whether recipe, GPU and tokens decide which of the experts are converted.
        other_frozen: how many of the other parameters take no gradient, while something does.
    """

    products: tuple[Product, ...]
    other_parameters: int
    logits: int
    not_counted: tuple[str, ...]
    undecided: bool = False
    other_frozen: int = 0

    @property
    def learning(self) -> int:
        """Elements of the weights that take a gradient."""
        frozen = sum(product.elements for product in self.products if product.frozen)
        return self.parameters - frozen - self.other_frozen

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


def shapes_of(model: torch.nn.Module, skip: Sequence[str] = (), experts: bool | str = EXPERTS) -> Shapes:
    """Read a model, converted or not, on any device; it is not changed.

    How often a layer or an expert multiplies a token is counted of a model of transformers that takes tokens, see
    ``count_of_made_up``; of layers that do not run there, and of any other model, it is assumed.

    Args:
        model: of one that is not converted, told is what ``convert_to_float8(model, skip=skip, experts=experts)``
            would convert; where ``experts`` is "auto" all experts, which ``Shapes.undecided`` says.
        skip: glob patterns; of a converted model they do nothing, with a ``Float8Warning``.
        experts: as ``convert_to_float8`` takes it.
    """
    refuse_unknown_experts(experts, None)
    modules = dict(model.named_modules())
    linears = {fqn: m for fqn, m in modules.items() if isinstance(m, torch.nn.Linear)}
    # "auto" counts as True here: recipe, GPU and tokens decide later, in ``experts.decided``.
    options = {"experts": experts if isinstance(experts, bool) else True, "tokens": None}
    # The reasons of a converted model stand on its modules; for a plain one they are those of a conversion.
    is_plain = not any(map(is_converted, modules.values()))
    reasons: dict[str, str | None]
    if is_plain:
        selection = Selection(layer_recipes(DEFAULT), layer_keep_x("auto"), skip=skip)
        reasons = selection.reasons(modules, linears) | other_reasons(modules, selection, options)
        if skip:
            idle_patterns(list(modules), reasons, selection, linears)
    else:
        if skip:
            warnings.warn(
                f"skip={list(skip)} does nothing to a model that is converted already; give it to convert_to_float8",
                Float8Warning,
                stacklevel=3,
            )
        reasons = {
            fqn: None if is_converted(m) else getattr(m, SKIP_REASON, "not converted")
            for fqn, m in modules.items()
        }
    # Output heads make logits, whether they would be converted or not.
    heads = {fqn for fqn, reason in default_reasons(modules, linears).items() if reason == HEAD}
    first: dict[tuple[str, tuple[str, ...]], str] = {}
    products: list[Product] = []
    seen = set()
    for fqn, layer in linears.items():
        layer_name = fqn.removesuffix(".base_layer")  # which PEFT puts under an adapter
        parent, _, name = layer_name.rpartition(".")
        # A tied weight multiplies in two places and is stored once.
        elements = 0 if layer.weight in seen else layer.weight.numel()
        seen.add(layer.weight)
        # The first of the siblings that read one x stands for it.
        uses, reads = (
            active_share_of_linear(model, fqn),
            first.setdefault((parent, _GROUPS.get(name, (name,))), fqn),
        )
        sizes = layer.out_features, layer.in_features, uses, elements
        head = getattr(modules.get(parent), "head_dim", None)
        places = reasons[fqn], reads, reads_attention(layer_name), block_of(fqn)
        head = head if isinstance(head, int) else HEAD_SIZE
        products.append(Product(fqn, *sizes, *places, head, frozen=_are_frozen(model, [layer.weight])))
    others, not_counted = _others(model, reasons)
    # Counts replace the assumed uses of models that can run on meta.
    products = _counted(model, products + others)
    counted = sum(product.elements for product in products)
    logits = sum(linears[fqn].out_features for fqn in heads)
    total = sum(p.numel() for p in model.parameters())
    undecided = is_plain and experts == AUTO_EXPERTS
    fixed = sum(p.numel() for p in model.parameters() if _are_frozen(model, [p]))
    # What remains are frozen parameters that multiply nothing.
    fixed -= sum(product.elements for product in products if product.frozen)
    return Shapes(tuple(products), total - counted, logits, not_counted, undecided, fixed)


def _counted(model: torch.nn.Module, products: list[Product]) -> list[Product]:
    """Return the products with the uses that a forward counts, where it counts any."""
    count = count_of_made_up(model)
    if isinstance(count, str) or not count.tokens:
        return products
    linears = {fqn for fqn, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    found = []
    for product in products:
        # The key of a count: the name of the module, and that of its parameter.
        keys = [(product.module, product.fqn.rpartition(".")[2])] if product.experts else []
        if product.fqn in linears:
            keys = [(product.fqn, name) for name in count.names(product.fqn)]
        multiplied = sum(count.own.get(key, 0.0) + count.elsewhere.get(key, 0.0) for key in keys)
        # 0 for a layer that did not run in that forward: the assumed uses stay.
        uses = multiplied / (product.rows * product.cols * count.tokens) or product.uses
        found.append(replace(product, uses=uses))
    return found


def reads_attention(fqn: str) -> bool:
    """Return whether a layer's x is the result of attention, judged by its name."""
    *parents, name = fqn.split(".")
    # "proj" and "dense" name many layers: they count in a module of attention only.
    own = any(word in part for part in parents for word in ("attn", "attention"))
    return name in SAVED_INPUTS or (own and name in ATTENTION_OUTPUTS)


def block_of(fqn: str) -> str | None:
    """Return the block's name: ``model.layers.3`` for ``model.layers.3.mlp.up_proj``; None outside of blocks."""
    parts = fqn.split(".")
    # The first number is that of the outermost list: experts in a list have a second one.
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


def _others(
    model: torch.nn.Module, reasons: Mapping[str, str | None]
) -> tuple[list[Product], tuple[str, ...]]:
    """Return experts, torch's attention, Conv1D and routers; and the classes of what cannot be counted."""
    found: list[Product] = []
    not_counted: dict[str, None] = {}
    for other in other_weights(model):
        fqn = "" if other.fqn == ROOT else other.fqn
        module = model.get_submodule(fqn)
        if other.multiplications is None:
            not_counted[other.detail.partition(":")[0]] = None
        elif seam_of(module) is not None:
            found += expert_products(model, fqn, None if reasons.get(fqn, "") is None else other.detail)
        else:
            for shape in other.shapes:
                # [E, N, K]: one token is multiplied by some of the E matrices.
                matrices = shape[0] if len(shape) == 3 else 1
                share = (active_share(model, fqn, matrices) or 1.0) if len(shape) == 3 else 1.0
                sizes = shape[-2], shape[-1], matrices * share, math.prod(shape)
                places = other.detail, other.fqn, reads_attention(other.fqn), block_of(other.fqn)
                fixed = _are_frozen(model, module.parameters(recurse=False))
                found.append(Product(other.fqn, *sizes, *places, frozen=fixed))
    return found, tuple(not_counted)


def expert_products(model: torch.nn.Module, fqn: str, reason: str | None) -> list[Product]:
    """Return the weights of a module of experts whose seam is known, in the order of its parameters.

    Args:
        model: the model.
        fqn: the module's name in it.
        reason: why it is not converted; None where it is.
    """
    module = model.get_submodule(fqn)
    seam = seam_of(module)
    found: list[Product] = []
    first: dict[tuple[str, ...], str] = {}
    for name, transposed in {} if seam is None else seam.weights_of(module).items():
        weight = module._parameters.get(name)
        if weight is None or weight.dim() != 3:
            continue
        experts, rows, cols = weight.shape
        # stored as [E, K, N]
        if transposed:
            rows, cols = cols, rows
        full = f"{fqn}.{name}" if fqn else name
        short = name.partition("_E")[0]  # torchtitan's w1_EFD
        reads = first.setdefault(_GROUPS.get(short, (name,)), full)
        # Matrices per token: top_k if the model says so, else all of them.
        uses = experts * (active_share(model, fqn, experts) or 1.0)
        sizes = rows, cols, uses, weight.numel()
        places = reason, reads, False, block_of(full)
        frozen = _are_frozen(model, [weight])
        found.append(Product(full, *sizes, *places, experts=experts, transposed=transposed, frozen=frozen))
    return found


def _are_frozen(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether these parameters take no gradient while others of the model do."""
    # If all parameters are frozen, none counts as frozen: adapters may be added later.
    return not any(p.requires_grad for p in parameters) and any(p.requires_grad for p in model.parameters())


def alike(products: Sequence[Product]) -> dict[tuple[str, int, int, str | None], list[Product]]:
    """Group the products by kind, N, K and reason."""
    found: dict[tuple[str, int, int, str | None], list[Product]] = {}
    for product in products:
        key = kind_of(product.fqn), product.rows, product.cols, product.reason
        found.setdefault(key, []).append(product)
    return found
