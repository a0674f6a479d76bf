"""What a model with a frozen base and adapters holds: bytes that learn, bytes that do not, what backward reads.

Adapters are PEFT's LoRA and DoRA, known by the names of their layers.
"""

from dataclasses import dataclass
from typing import Any

import torch

from f8sub.convert.primary_weights import is_primary
from f8sub.estimator.shapes import Shapes
from f8sub.weights.primary_weight import PrimaryWeight
from f8sub.weights.weight import local_tensor

FIRST, SECOND, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
"""What PEFT calls an adapter's two layers, and DoRA's magnitudes. Source: peft 0.21, ``tuners/lora/layer.py``."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Of a model some of whose parameters are frozen, and others learn.

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
    """What a model has of adapters; None where nothing is frozen, or all of it."""
    parameters = dict(model.named_parameters())
    learning = sum(p.numel() * p.itemsize for p in parameters.values() if p.requires_grad)
    frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
    if not learning or not frozen:
        return None
    codes = frozenset(name.removesuffix(".weight") for name, p in frozen.items() if _is_codes(p))
    held = sum(
        p.numel() * (1 if name.removesuffix(".weight") in codes else p.itemsize) for name, p in frozen.items()
    )
    return Adapters(learning, held, codes, _saved(model, shapes))


def _is_codes(parameter: torch.Tensor) -> bool:
    local = local_tensor(parameter)
    if local.is_meta:  # without values yet, which ``load_float8`` or ``drop_high_precision`` takes to codes
        return is_primary(parameter)
    return isinstance(local, PrimaryWeight) and (local.primary.master is None or local.primary.dropping)


def _saved(model: torch.nn.Module, shapes: Shapes) -> float:
    """Of each adapter its x, in its own dtype, and what its first layer makes.

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
        drops = not isinstance(modules[f"{owner}.lora_dropout.{name}"], torch.nn.Identity)
        if drops or size != modules[base.fqn].weight.itemsize:
            found += product.cols * (size + drops)
        elif not (base.shares_x or base.reads_attention):
            found += product.cols * size
        found += product.rows * size
        if name in modules[f"{owner}.{MAGNITUDE}"]:
            found += 2 * base.rows * size
    return found
