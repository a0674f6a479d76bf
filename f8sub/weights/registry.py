"""The layers of one conversion, for what they do together: one amax table, one check across ranks."""

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from f8sub.errors import Float8Warning
from f8sub.kernels.gemm.select import Plan, reference_warning

if TYPE_CHECKING:
    from f8sub.linear.float8_linear import Float8Linear

_SEEN = "float8_seen"
"""Attribute of every module that ``convert_to_float8`` was given."""


class ConvertedLayers:
    """All layers of one ``convert_to_float8`` call, in an order that every rank agrees on.

    Holds no layer alive. A deep copy or a pickle of the model makes one of its own, which its layers enter as they
    are made.

    Attributes:
        primary_weights: whether the weights become float8 once an optimizer has their masters.
        changes: number of events that changed the weights on every rank alike: optimizer steps, load_state_dict.
        idle_patterns: patterns of options given by patterns which decide for none of the layers, with reasons.
        steps: number of optimizer steps among them.
        stepped: which of these was the last of each weight, by the name of its layer; 0 where there was none.
        loaded_at: what ``steps`` was when a state dict was loaded last; its amax histories cover the steps before.
        step_guards: what skips steps of these weights whose gradients are not finite; each lives with its optimizer.
        told_of_reference: whether a warning said that GEMMs of these layers are slow on their GPU.
        fsdp: what the FSDP2 path keeps for these layers; None until the first all-gather or precompute_scales.
    """

    made: ClassVar[int] = 0
    """How many there are or were: a module that was walked for them before the last one is walked again."""

    histories_made: ClassVar[bool] = False
    """Whether any layer ever had delayed scaling: until then this is all that the end of an optimizer step reads."""

    def __init__(self, primary_weights: bool = False, idle_patterns: tuple[str, ...] = ()) -> None:
        ConvertedLayers.made += 1
        self.primary_weights = primary_weights
        self.idle_patterns = idle_patterns
        self._layers: weakref.WeakSet[Float8Linear] = weakref.WeakSet()
        self.changes = 0
        self.steps = 0
        self.stepped: Counter[str] = Counter()
        self.loaded_at = 0
        self.step_guards: weakref.WeakSet[Any] = weakref.WeakSet()
        self.told_of_reference = False
        self.fsdp: Any = None

    @staticmethod
    def see(model: torch.nn.Module) -> None:
        """Mark a model, and each part of it, as one that ``convert_to_float8`` was given, if only to leave it alone."""
        for module in model.modules():
            module.__dict__[_SEEN] = True  # copies for pipeline stages keep it

    @staticmethod
    def forget(model: torch.nn.Module) -> None:
        """Take the mark off again."""
        ConvertedLayers.made += 1
        for module in model.modules():
            module.__dict__.pop(_SEEN, None)

    @staticmethod
    def saw(model: torch.nn.Module) -> bool:
        """Whether any part of the model was given to ``convert_to_float8``."""
        return any(_SEEN in module.__dict__ for module in model.modules())

    def add(self, layer: "Float8Linear") -> None:
        """Enter a layer."""
        self._layers.add(layer)

    def discard(self, layer: "Float8Linear") -> None:
        """Take a layer out."""
        self._layers.discard(layer)

    def warn_of_reference(self, plans: Iterable[Plan]) -> None:
        """Warn once a conversion where GEMMs on a GPU fall to the reference backend, see ``reference_warning``."""
        if not self.told_of_reference and (message := reference_warning(plans)):
            self.told_of_reference = True
            warnings.warn(message, Float8Warning, stacklevel=4)

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator["Float8Linear"]:
        return iter(sorted(self._layers, key=lambda layer: layer.fqn))

    def __reduce__(self) -> tuple[Any, ...]:
        return ConvertedLayers, (self.primary_weights, self.idle_patterns)
