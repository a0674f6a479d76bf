"""Reads a model's products off its modules, and what of them is or would be converted."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from f8sub.convert.products import (
    ROOT,
    SKIP_REASON,
    Product,
    Shapes,
    active_share,
    are_frozen,
    block_of,
    expert_products,
    kind_of,
    linear_products,
    other_weights,
    reads_attention,
)
from f8sub.convert.selection import HEAD, Selection, default_reasons, idle_patterns
from f8sub.errors import Float8Warning
from f8sub.estimator.counted_forward import count_of_made_up
from f8sub.experts.seams import AUTO_EXPERTS, EXPERTS, refuse_unknown_experts, seam_of
from f8sub.weights.weight import is_converted


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
    # "auto" counts as True here: recipe, GPU and tokens decide later, in ``estimate``.
    wanted = experts if isinstance(experts, bool) else True
    # The reasons of a converted model stand on its modules; for a plain one they are those of a conversion.
    is_plain = not any(map(is_converted, modules.values()))
    reasons: dict[str, str | None]
    if is_plain:
        selection = Selection(skip=skip)
        reasons = selection.reasons(modules, linears) | selection.reasons_of_experts(modules, wanted)
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
    products = linear_products(model, reasons)
    others, not_counted = _others(model, reasons)
    # Counts replace the assumed uses of models that can run on meta.
    products = _counted(model, products + others)
    counted = sum(product.elements for product in products)
    logits = sum(linears[fqn].out_features for fqn in heads)
    total = sum(p.numel() for p in model.parameters())
    undecided = is_plain and experts == AUTO_EXPERTS and any(product.experts for product in products)
    fixed = sum(p.numel() for p in model.parameters() if are_frozen(model, [p]))
    # What remains are frozen parameters that multiply nothing.
    fixed -= sum(product.elements for product in products if product.frozen)
    asked = experts if is_plain else None
    return Shapes(tuple(products), total - counted, logits, not_counted, asked, undecided, fixed)


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
                fixed = are_frozen(model, module.parameters(recurse=False))
                found.append(Product(other.fqn, *sizes, *places, frozen=fixed))
    return found, tuple(not_counted)


def alike(products: Sequence[Product]) -> dict[tuple[str, int, int, str | None], list[Product]]:
    """Group the products by kind, N, K and reason."""
    found: dict[tuple[str, int, int, str | None], list[Product]] = {}
    for product in products:
        key = kind_of(product.fqn), product.rows, product.cols, product.reason
        found.setdefault(key, []).append(product)
    return found
