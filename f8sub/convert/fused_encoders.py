"""Has converted encoders run their layers in evaluation, too.

Without gradients ``nn.TransformerEncoderLayer`` multiplies by the weights of ``linear1`` and ``linear2`` itself, and
``nn.TransformerEncoder`` gives its layers nested tensors where there is a padding mask.
"""

import torch
from typing_extensions import override

from f8sub.linear.float8_linear import Float8Linear
from f8sub.weights.conversion import Conversion, LayerGuest


class FusedEncoders(LayerGuest):
    """What both modules ask before they fuse is set to no; ``convert_from_float8`` leaves it so."""

    @override
    def converted(self, model: torch.nn.Module, conversion: Conversion) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.TransformerEncoder) and _is_in(module):
                module.use_nested_tensor = False
            if isinstance(module, torch.nn.TransformerEncoderLayer) and _is_in(module):
                module.activation_relu_or_gelu = 0


def _is_in(module: torch.nn.Module) -> bool:
    return any(isinstance(child, Float8Linear) for child in module.modules())
