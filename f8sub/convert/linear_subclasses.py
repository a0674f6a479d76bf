"""Which classes of linear layers are converted, and to which."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from f8sub.linear.float8_linear import Float8Linear

extensions: dict[type[torch.nn.Linear], Mapping[str, Any]] = {}
"""Those whose forward is nn.Linear's, or calls it through ``super()``, and whose weight nothing else reads.

With methods that their float8 classes have besides, such as one by which another forward comes to the product."""


_made: dict[type[torch.nn.Linear], type[Float8Linear]] = {torch.nn.Linear: Float8Linear}


def float8_class(cls: type[torch.nn.Linear]) -> type[Float8Linear]:
    """The class that layers of ``cls`` turn into: ``Float8Linear``, or one of both.

    Float8Linear stands right before nn.Linear in its method resolution order: ``super().forward`` of ``cls`` runs in
    float8, and everything else of ``cls`` stays.
    """
    if cls not in _made:
        members = {"__module__": cls.__module__, "__reduce_ex__": _reduce, **extensions.get(cls, {})}
        _made[cls] = type(f"Float8{cls.__name__}", (cls, Float8Linear), members)
    return _made[cls]


def plain_class(layer: Float8Linear) -> type[torch.nn.Linear]:
    """The class that the layer had before it was converted."""
    return plain_class_of(type(layer))


def plain_class_of(cls: type[Float8Linear]) -> type[torch.nn.Linear]:
    """The class that turned into ``cls``."""
    return torch.nn.Linear if cls is Float8Linear else cls.__bases__[0]


def _reduce(layer: Float8Linear, protocol: Any) -> Any:
    """Copies and pickles name the class that was converted: one of two has no name to be found by."""
    return _new_layer, (plain_class(layer),), layer.__getstate__()  # type: ignore[no-untyped-call]


def _new_layer(cls: type[torch.nn.Linear]) -> Float8Linear:
    both = float8_class(cls)
    return both.__new__(both)


def why_not_class(module: torch.nn.Linear) -> str | None:
    """Why a linear layer's class cannot become a float8 one; None where it can.

    What decides is whose forward runs: a subclass that inherits nn.Linear's is converted with all that it adds.
    """
    name = type(module).__name__
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return (
            "nn.MultiheadAttention reads this weight itself and never calls the layer; for float8 write attention "
            "with nn.Linear layers and F.scaled_dot_product_attention"
        )
    # prune and the older weight_norm and spectral_norm of torch.nn.utils make the weight in a hook before forward.
    if torch.nn.utils.parametrize.is_parametrized(module) or "weight" not in module._parameters:
        return "its weight is parametrized"
    if module.weight.dim() != 2:
        return f"its weight is of shape {tuple(module.weight.shape)}, several projections in one"
    if "forward" in vars(module):
        return f"something replaced the forward of this {name}; convert first, then wrap its forward"
    if type(module).__module__.startswith("torchao."):
        return f"it is torchao's {name}; convert a model by one library"
    if type(module).forward is not torch.nn.Linear.forward and type(module) not in extensions:
        return f"its class {name} overrides nn.Linear's forward"
    return None
