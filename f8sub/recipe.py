"""A recipe says how each of the three GEMMs of a linear layer reads its two operands."""

import importlib
import inspect
import pkgutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from f8sub import recipes
from f8sub.errors import Float8ConfigError, nearest, unknown
from f8sub.formats import Float8Format, why_not_derivable

if TYPE_CHECKING:
    from f8sub.recipes.delayed import DelayedScaling

OperandName = Literal["x", "w", "dy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec:
    """One GEMM, ``out = a @ b.t()``.

    Attributes:
        a: format of the left operand, (M, K); None with ``b`` None: this GEMM stays in high precision.
        b: format of the right operand, (N, K).
        fast_accum: keep the sums over all of K in the tensor core's own, narrower accumulator; else they move to
            float32 every 128 elements.

    Raises:
        Float8ConfigError: one operand in float8 and the other not, or two that do not fit along K.
    """

    a: Float8Format | None
    b: Float8Format | None
    fast_accum: bool = False

    def __post_init__(self) -> None:
        if (self.a is None) != (self.b is None):
            raise Float8ConfigError(
                f"a GEMM takes both operands in float8 or neither, got a={self.a}, b={self.b}"
            )
        # A transform along K cancels where both operands have it, and both are filled up to the same K.
        along = {(f.hadamard, f.depth_multiple) for f in (self.a, self.b) if f is not None}
        if len(along) > 1:
            raise Float8ConfigError(
                f"both operands of a GEMM have the same Hadamard transform and packing, got a={self.a}, b={self.b}"
            )


HIGH_PRECISION_GEMM = GemmSpec(a=None, b=None)
"""A GEMM that reads both operands as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The three GEMMs of a linear layer with x (M, K), w (N, K) and dy (M, N).

    Attributes:
        name: how logs and errors call it.
        fprop: ``y = x @ w.t()``; a = x rowwise, b = w rowwise.
        dgrad: ``dx = dy @ w``; a = dy rowwise, b = w columnwise.
        wgrad: ``dw = dy.t() @ x``; a = dy columnwise, b = x columnwise.
        delayed: how scales are computed from past amaxes; None for those of the current one.

    Attributes that follow:
        scaling: what the scales are computed from other than the current amax; None for nothing.

    Raises:
        Float8ConfigError: w's columnwise operand cannot be derived from its rowwise codes. A weight is cast
            once and crosses the wire once, so its second usage is always derived from its first. Or ``delayed.check``.
    """

    name: str
    fprop: GemmSpec
    dgrad: GemmSpec
    wgrad: GemmSpec
    delayed: "DelayedScaling | None" = None
    scaling: "DelayedScaling | None" = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaling", self.delayed)
        if self.delayed is not None:
            self.delayed.check(self)
        rowwise, columnwise = self.formats("w")
        if rowwise and columnwise and (reason := why_not_derivable(rowwise, columnwise)):
            raise Float8ConfigError(
                f"recipe {self.name!r}: dgrad reads the columnwise weight, which is derived from the rowwise "
                f"codes of fprop, but {reason}; give fprop.b and dgrad.b formats that agree"
            )

    def formats(self, operand: OperandName) -> tuple[Float8Format | None, Float8Format | None]:
        """(rowwise, columnwise) formats of one of the three tensors; None where no float8 GEMM reads it."""
        if operand == "x":
            return self.fprop.a, self.wgrad.b
        if operand == "w":
            return self.fprop.b, self.dgrad.b
        if operand == "dy":
            return self.dgrad.a, self.wgrad.a
        raise Float8ConfigError(f'operand is one of "x", "w", "dy", got {operand!r}')

    def with_high_precision(
        self, *, fprop: bool = False, dgrad: bool = False, wgrad: bool = False
    ) -> "Recipe":
        """The same recipe with more GEMMs in high precision, and a name that says so.

        A weight that one of its GEMMs, fprop or dgrad, reads in high precision is gathered in high precision.
        """
        asked = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}
        in_float8 = [gemm for gemm in asked if getattr(self, gemm) != HIGH_PRECISION_GEMM]
        taken = [gemm for gemm in in_float8 if asked[gemm]]
        if not taken:
            return self
        name = f"{self.name}, {' and '.join(taken)} in high precision"
        # Without a float8 GEMM nothing is left that a past amax could scale.
        changes: dict[str, Any] = dict.fromkeys(taken, HIGH_PRECISION_GEMM)
        return replace(self, name=name, delayed=None if taken == in_float8 else self.delayed, **changes)


def recipe_names() -> list[str]:
    """Every recipe that comes with f8sub: the file names of ``f8sub/recipes``."""
    return sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


def get_recipe(recipe: Recipe | str, **options: Any) -> Recipe:
    """The recipe of that name; a ``Recipe`` of the caller's own needs no registration and is returned as is.

    Args:
        recipe: one of ``recipe_names()``, or a ``Recipe``.
        options: of the recipe's function ``recipe`` in ``f8sub/recipes``: ``get_recipe("gridquant", block=128)``.

    Raises:
        Float8ConfigError: no such name or option, and the message lists the valid ones; or no such value of one.
    """
    if isinstance(recipe, Recipe):
        if not options:
            return recipe
        raise Float8ConfigError(
            f"options {sorted(options)} go with a recipe's name, got {recipe.name!r} itself"
        )
    if recipe not in recipe_names():
        raise unknown("recipe", recipe, recipe_names(), ", or pass an f8sub.Recipe")
    # Here, because recipes import this module.
    module: Any = importlib.import_module(f"{recipes.__name__}.{recipe}")
    if not options:
        return cast(Recipe, module.RECIPE)
    valid = inspect.signature(module.recipe).parameters
    if others := sorted(set(options) - set(valid)):
        near = nearest(others[0], valid)
        told = f" (nearest: {', '.join(near)})" if near else ""
        raise Float8ConfigError(
            f"recipe {recipe!r} has no options {others}{told}; it has {list(valid) or 'none'}"
        )
    for name, value in options.items():
        # A word such as "false" would be taken for true.
        if isinstance(valid[name].default, bool) and not isinstance(value, bool):
            raise Float8ConfigError(f"option {name} of recipe {recipe!r} is True or False, got {value!r}")
    return cast(Recipe, module.recipe(**options))
