"""Refuses what recipes cannot keep of x, and opens the scopes in which siblings share an x."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from f8sub.convert.checks import Chosen
from f8sub.errors import Float8ConfigError
from f8sub.linear.float8_linear import Float8Linear
from f8sub.linear.saved_input import AUTO, why_not_kept
from f8sub.linear.shared_input import close_scope, open_scope
from f8sub.weights.conversion import Conversion, LayerGuest


def refuse_unkeepable(chosen: Sequence[Chosen]) -> None:
    """Raise Float8ConfigError for a layer whose recipe is unable to keep x as it is asked to."""
    for _, fqn, plan, _, keep_x in chosen:
        if reason := why_not_kept(plan.recipe, keep_x):
            raise Float8ConfigError(
                f"{fqn} with recipe {plan.recipe.name!r} cannot take keep_x={keep_x!r}: {reason}. Give it 'auto'"
            )


class KeepX(LayerGuest):
    """Compares ``keep_x`` across ranks, and shows it where it is not "auto"."""

    @override
    def alike(self, layer: torch.nn.Module) -> dict[str, str]:
        return {"keep_x": layer._f8sub.keep_x} if isinstance(layer, Float8Linear) else {}

    @override
    def deviation(self, layer: torch.nn.Module) -> str | None:
        keep_x = layer._f8sub.keep_x if isinstance(layer, Float8Linear) else AUTO
        return None if keep_x == AUTO else f"keep_x={keep_x}"


class SharedInputs(LayerGuest):
    """Registers the hooks that open and close the scopes of a converted model."""

    @override
    def converted(self, model: torch.nn.Module, conversion: Conversion) -> None:
        # Under the same id everywhere: dynamo guards on it, and would compile equal blocks one by one.
        shared: int | None = None
        for module in model.modules():
            # Only siblings are given the very same x: q, k and v, or gate and up.
            if sum(isinstance(child, Float8Linear) for child in module.children()) > 1:
                module.register_forward_pre_hook(open_scope)
                # Always called: a forward that raises must not leave an x in the scope, which would keep its memory.
                own = module.register_forward_hook(close_scope, always_call=True).id
                shared = own if shared is None else shared
                for hooks in (module._forward_hooks, module._forward_hooks_always_called):
                    hooks[shared] = hooks.pop(own)  # type: ignore[assignment]
