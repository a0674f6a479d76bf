"""Chooses the float8 class of a linear layer's class, and gives it back."""

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from f8sub.linear.float8_linear import Float8Linear
from f8sub.weights.conversion import Conversion, LayerGuest

extensions: dict[type[torch.nn.Linear], Mapping[str, Any]] = {}
"""Classes whose forward is nn.Linear's, or calls it through ``super()``, and whose weight nothing else reads.

Each with methods that its float8 class has besides, such as one by which another forward comes to the product."""


_made: dict[type[torch.nn.Linear], type[Float8Linear]] = {torch.nn.Linear: Float8Linear}


def float8_class(cls: type[torch.nn.Linear]) -> type[Float8Linear]:
    """Return the class that layers of ``cls`` turn into: ``Float8Linear``, or one of both.

    Float8Linear stands right before nn.Linear in its method resolution order: ``super().forward`` of ``cls`` runs in
    float8, and everything else of ``cls`` stays.
    """
    if cls not in _made:
        # One class per user's class, cached: dynamo guards on classes, and isinstance checks of equal layers agree.
        members = {"__module__": cls.__module__, "__reduce_ex__": _reduce, **extensions.get(cls, {})}
        _made[cls] = type(f"Float8{cls.__name__}", (cls, Float8Linear), members)
    return _made[cls]


def plain_class(layer: Float8Linear) -> type[torch.nn.Linear]:
    """Return the class that the layer had before it was converted."""
    return plain_class_of(type(layer))


def plain_class_of(cls: type[Float8Linear]) -> type[torch.nn.Linear]:
    """Return the class that turned into ``cls``, before which FSDP2 or a parametrization may have put its own."""
    converted = {made: plain for plain, made in _made.items()}
    return next(converted[base] for base in cls.__mro__ if base in converted)


def _reduce(layer: Float8Linear, protocol: Any) -> Any:
    """Have copies and pickles name the class that was converted: one of two has no name to be found by."""
    return _new_layer, (plain_class(layer),), layer.__getstate__()  # type: ignore[no-untyped-call]


def _new_layer(cls: type[torch.nn.Linear]) -> Float8Linear:
    both = float8_class(cls)
    return both.__new__(both)


class FusedEncoders(LayerGuest):
    """Turns off the fused paths of nn.TransformerEncoder and its layers; ``convert_from_float8`` leaves them off.

    Without gradients ``nn.TransformerEncoderLayer`` multiplies by the weights of ``linear1`` and ``linear2`` itself,
    and ``nn.TransformerEncoder`` gives its layers nested tensors where there is a padding mask.
    """

    @override
    def converted(self, model: torch.nn.Module, conversion: Conversion) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.TransformerEncoder) and _is_in(module):
                # What the encoder asks before it makes nested tensors, which no float8 layer takes.
                module.use_nested_tensor = False
            if isinstance(module, torch.nn.TransformerEncoderLayer) and _is_in(module):
                # What a layer asks before it runs the fused kernel, which reads
                # ``linear1.weight`` and never calls ``linear1``.
                module.activation_relu_or_gelu = 0


def _is_in(module: torch.nn.Module) -> bool:
    return any(isinstance(child, Float8Linear) for child in module.modules())
