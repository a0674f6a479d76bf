"""Recipe contexts: another recipe, or none, for the forwards inside them."""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from f8sub.errors import Float8ConfigError
from f8sub.linear import plan_in_use
from f8sub.recipe import HIGH_PRECISION_GEMM, Recipe, get_recipe
from f8sub.torch_compat import constant_result

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_HIGH_PRECISION = Recipe(
    name="high precision",
    fprop=HIGH_PRECISION_GEMM,
    dgrad=HIGH_PRECISION_GEMM,
    wgrad=HIGH_PRECISION_GEMM,
)


class autocast:
    """Run the forwards of converted layers and experts in the context with another recipe, or in high precision.

        with f8sub.autocast(recipe="rowwise"):
            y = model(x)            # every converted layer with that recipe
            with f8sub.autocast(enabled=False):
                z = model(x)        # in high precision
        y.backward(dy)              # as the forward ran, context or not

    Contexts nest, the inner one overrides; the outer one is back when it is left, by an exception too. Each thread has
    its own, and one instance may be entered again, by several threads as well. It decorates functions, too. Backward,
    activation checkpointing included, uses what its forward used, so a context around it does nothing.

    Only layers that ``convert_to_float8`` converted take part, and no other autocast is meant: ``torch.autocast``
    chooses the high-precision dtype, and goes together with this one.

    Weights that FSDP2 gathers in float8 were cast with the layer's own recipe before the context is known. So there
    ``enabled=False`` computes in high precision with the gathered weight, dequantized, and a recipe has to read the
    weight in the format that was gathered, or in high precision. All others are read from the master weight itself.

    Args:
        recipe: one of ``recipe_names()``, or a ``Recipe``; None for the recipe that each layer was converted with.
            Inside compiled code torch 2.11 takes names alone.
        enabled: False for high precision; ``recipe`` is not used then.

    Raises:
        Float8ConfigError: here, an unknown recipe, or a flag in its place; in a layer's forward, a recipe that it
            cannot run, see above.
    """

    def __init__(self, recipe: Recipe | str | None = None, enabled: bool = True) -> None:
        if isinstance(recipe, bool):
            raise Float8ConfigError(
                f"the first argument of f8sub.autocast is a recipe, got {recipe}; write autocast(enabled={recipe})"
            )
        self._recipe, self._enabled = recipe, enabled
        asked = None if recipe is None else _key_of(recipe)
        self._key = asked if enabled else _key_of(None)

    def __call__(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """``function``, run inside the context."""
        recipe, enabled = self._recipe, self._enabled

        @functools.wraps(function)
        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            # Made anew: dynamo does not enter a context that was made outside of what it compiles.
            with autocast(recipe, enabled):
                return function(*args, **kwargs)

        return run

    def __enter__(self) -> "autocast":
        plan_in_use.enter(self._key)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        plan_in_use.leave()


@constant_result
def _key_of(recipe: Recipe | str | None) -> str:
    """Of high precision where ``recipe`` is None: dynamo of 2.11 hands over names, and no recipes."""
    return plan_in_use.key_of(_HIGH_PRECISION if recipe is None else get_recipe(recipe))
