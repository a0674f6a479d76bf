"""Scopes in which siblings share an x: which modules of a converted model open one."""

import torch
from typing_extensions import override

from f8sub.linear.float8_linear import Float8Linear
from f8sub.linear.shared_input import close_scope, open_scope
from f8sub.weights.conversion import Conversion, LayerGuest


class SharedInputs(LayerGuest):
    """What opens and closes the scopes of a converted model."""

    @override
    def converted(self, model: torch.nn.Module, conversion: Conversion) -> None:
        # Under the same id everywhere: dynamo guards on it, and would compile equal blocks one by one.
        shared: int | None = None
        for module in model.modules():
            if sum(isinstance(child, Float8Linear) for child in module.children()) > 1:
                module.register_forward_pre_hook(open_scope)
                own = module.register_forward_hook(close_scope, always_call=True).id
                shared = own if shared is None else shared
                for hooks in (module._forward_hooks, module._forward_hooks_always_called):
                    hooks[shared] = hooks.pop(own)  # type: ignore[assignment]
