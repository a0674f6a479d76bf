"""Subclasses of nn.Linear that are converted as well, with all that they add."""

from typing import Any

import torch

from f8sub.linear.float8_linear import Float8Linear

extensions: set[type[torch.nn.Linear]] = set()
"""Those whose forward is nn.Linear's, or calls it through ``super()``, and whose weight nothing else reads."""


_made: dict[type[torch.nn.Linear], type[Float8Linear]] = {torch.nn.Linear: Float8Linear}


def float8_class(cls: type[torch.nn.Linear]) -> type[Float8Linear]:
    """The class that layers of ``cls`` turn into: ``Float8Linear``, or one of both.

    Float8Linear stands right before nn.Linear in its method resolution order: ``super().forward`` of ``cls`` runs in
    float8, and everything else of ``cls`` stays.
    """
    if cls not in _made:
        members = {"__module__": cls.__module__, "__reduce_ex__": _reduce}
        _made[cls] = type(f"Float8{cls.__name__}", (cls, Float8Linear), members)
    return _made[cls]


def plain_class(layer: Float8Linear) -> type[torch.nn.Linear]:
    """The class that the layer had before it was converted."""
    return torch.nn.Linear if type(layer) is Float8Linear else type(layer).__bases__[0]


def _reduce(layer: Float8Linear, protocol: Any) -> Any:
    """Copies and pickles name the class that was converted: one of two has no name to be found by."""
    return _new_layer, (plain_class(layer),), layer.__dict__


def _new_layer(cls: type[torch.nn.Linear]) -> Float8Linear:
    both = float8_class(cls)
    return both.__new__(both)
