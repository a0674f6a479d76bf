"""Float8Linear to nn.Linear, in place, by class swap."""

from typing import Any, TypeVar

import torch

from f8sub.convert import sockets
from f8sub.convert.checks import is_converted, refuse_other_than_a_module, refuse_sharded
from f8sub.convert.convert import check_ranks_hook, replace_parameter
from f8sub.convert.linear_subclasses import plain_class
from f8sub.convert.swiglu_input import round_to_float8
from f8sub.delayed.histories import share_histories_hook
from f8sub.errors import Float8ConfigError
from f8sub.linear.float8_linear import Float8Linear
from f8sub.linear.shared_input import close_scope, open_scope
from f8sub.torch_compat import remove_hook
from f8sub.weights.checks import warn_of_fsdp1
from f8sub.weights.conversion import Conversion
from f8sub.weights.weight import Weight

Model = TypeVar("Model", bound=torch.nn.Module)

HOOKS = (check_ranks_hook, share_histories_hook, open_scope, close_scope, round_to_float8, warn_of_fsdp1)
"""The hooks that a conversion puts on modules."""


def convert_from_float8(model: Model) -> Model:
    """Turn every ``Float8Linear`` back into the nn.Linear it was, in place, with the same parameters.

    Raises:
        Float8ConfigError: the model is sharded; load its state dict into a plain model instead. Or a converted module
            has parametrizations.
    """
    refuse_other_than_a_module("convert_from_float8", model)
    refuse_sharded(
        model,
        "convert_from_float8 takes a model before it is sharded; load the state dict into a plain model instead",
    )
    _refuse_parametrized(model)
    module: Any
    for module in model.modules():
        for hook in HOOKS:
            remove_hook(hook, module)
        if not is_converted(module):
            continue
        conversion: Conversion = module.converted
        for name, weight in list(module._parameters.items()):  # under other names, too, where it is pruned
            if isinstance(weight, Weight):
                replace_parameter(module, name, torch.nn.Parameter(weight.plain, weight.requires_grad))
        conversion.discard(module)
        for converter in sockets.converters:
            if converter.takes(module):
                converter.revert(module)
        if isinstance(module, Float8Linear):
            del module.plan, module.fqn, module.converted, module.float8_all_gather, module.keep_x
            for guest in conversion.layer_guests:
                guest.left(module)
            module.__class__ = plain_class(module)  # type: ignore[assignment]
    Conversion.forget(model)
    return model


def _refuse_parametrized(model: torch.nn.Module) -> None:
    """A parametrized module has a class that torch made of its float8 class."""
    found = [m for m in model.modules() if is_converted(m) and "parametrizations" in m._modules]
    if found:
        fqns = ", ".join(module.fqn for module in found)  # type: ignore[misc]
        raise Float8ConfigError(
            f"{fqns}: convert_from_float8 cannot give back the class of a module that has parametrizations; call "
            "torch.nn.utils.parametrize.remove_parametrizations for them before"
        )
