"""A recipe says how each of the three GEMMs of a linear layer reads its two operands."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast

import torch

from f8sub import recipes
from f8sub.errors import Float8ConfigError
from f8sub.formats import Float8Format, why_not_derivable

OperandName = Literal["x", "w", "dy"]

MOST_MARGIN = 127
"""More powers of two of headroom than that leave every scale at its smallest, whatever the amax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec:
    """One GEMM, ``out = a @ b.t()``.

    Attributes:
        a: format of the left operand, (M, K); None with ``b`` None: this GEMM stays in high precision.
        b: format of the right operand, (N, K).
        fast_accum: let the GEMM keep its sums in the tensor core's own, narrower accumulator over all of K; else
            it moves them to float32 every 128 elements.

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
        if self.a is None or self.b is None:
            return
        if self.a.hadamard != self.b.hadamard or self.a.depth_multiple != self.b.depth_multiple:
            raise Float8ConfigError(
                f"both operands of a GEMM have the same Hadamard transform and packing along K, got a={self.a}, "
                f"b={self.b}"
            )


HIGH_PRECISION_GEMM = GemmSpec(a=None, b=None)
"""A GEMM that reads both operands as they are."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DelayedScaling:
    """Scales of a tensor's past amaxes instead of its current one; the parameters are TransformerEngine's.

    A history has ``amax_history_len`` rows: row 0 is staging, the largest amax since the last roll; rows 1 and on hold
    what was staged before, oldest first. Once per optimizer step ``amax_compute_algo`` picks an amax of all rows, the
    scale is made of it, and the history rolls: row 1 is dropped, row 0 becomes the last one and is zero again. A
    tensor that was not seen, or was all zero, keeps its scale and its history.

    Attributes:
        margin: powers of two of headroom: the scale is ``fp8_max / amax / 2**margin``.
        dy_margin: the least headroom of dy's scales, where ``margin`` is smaller. TransformerEngine has none.
        interval: optimizer steps from one scale to the next; the history rolls at every step.
        amax_history_len: rows of the history, staging included.
        amax_compute_algo: ``"max"`` of all rows, ``"most_recent"`` (row 0), or a callable from a history, float32
            (amax_history_len, tensors), to their amaxes, (tensors,).
        scaling_factor_compute_algo: None for the formula above, or a callable of (amax, scale, fp8_max, recipe) with
            float32 (tensors,), the same of the scales so far (0: none yet), a number, and this object, to new
            scales, (tensors,). What it returns is used where it is finite and positive.
        reduce_amax: x's and dy's amaxes are the largest of all ranks that hold the layer; False keeps each rank's own.

    Raises:
        Float8ConfigError: a value that none of this can be done with.
    """

    margin: float = 0
    dy_margin: float = 0
    interval: int = 1
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        for name in ("margin", "dy_margin"):
            margin = getattr(self, name)
            if type(margin) not in (int, float) or not 0 <= margin <= MOST_MARGIN:
                raise Float8ConfigError(f"{name} is 0 to {MOST_MARGIN} powers of two, got {margin!r}")
        for name in ("interval", "amax_history_len"):
            count = getattr(self, name)
            if type(count) is not int or count < 1:
                raise Float8ConfigError(f"{name} is a whole number of at least 1, got {count!r}")
        for name, words, others in (
            ("amax_compute_algo", '"max", "most_recent"', ("max", "most_recent")),
            ("scaling_factor_compute_algo", "None", (None,)),
        ):
            algorithm = getattr(self, name)
            if algorithm not in others and not callable(algorithm):
                raise Float8ConfigError(f"{name} is {words} or a callable, got {algorithm!r}")
            if not isinstance(algorithm, Hashable):
                raise Float8ConfigError(
                    f"{name} is a callable that tells recipes apart, and {algorithm!r} has no hash; define __hash__, "
                    "or pass a function"
                )
        if not isinstance(self.reduce_amax, bool):
            raise Float8ConfigError(f"reduce_amax is True or False, got {self.reduce_amax!r}")

    def __repr__(self) -> str:
        """The fields; callables by name, which all ranks share, not by address."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = (
            f"{name}={getattr(value, '__qualname__', type(value).__name__) if callable(value) else repr(value)}"
            for name, value in values.items()
        )
        return f"DelayedScaling({', '.join(shown)})"

    def margin_of(self, operand: OperandName) -> float:
        """Powers of two of headroom of one operand's scales."""
        return max(self.margin, self.dy_margin) if operand == "dy" else self.margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The three GEMMs of a linear layer with x (M, K), w (N, K) and dy (M, N).

    Attributes:
        name: how logs and errors call it.
        fprop: ``y = x @ w.t()``; a = x rowwise, b = w rowwise.
        dgrad: ``dx = dy @ w``; a = dy rowwise, b = w columnwise.
        wgrad: ``dw = dy.t() @ x``; a = dy columnwise, b = x columnwise.
        delayed: how scales follow from past amaxes; None for current scaling.

    Attributes that follow:
        scaling: what the scales are made of besides the current amax; None for nothing.

    Raises:
        Float8ConfigError: w's columnwise operand cannot be derived from its rowwise codes. A weight is cast
            once and crosses the wire once, so its second usage is always made from its first. Or delayed scaling
            of a tensor that has more than one scale.
    """

    name: str
    fprop: GemmSpec
    dgrad: GemmSpec
    wgrad: GemmSpec
    delayed: DelayedScaling | None = None
    scaling: DelayedScaling | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaling", self.delayed)
        if self.delayed is not None:
            self._check_delayed()
        rowwise, columnwise = self.formats("w")
        if rowwise is None or columnwise is None:
            return
        if reason := why_not_derivable(rowwise, columnwise):
            raise Float8ConfigError(
                f"recipe {self.name!r}: dgrad reads the columnwise weight, which is derived from the rowwise "
                f"codes of fprop, but {reason}; give fprop.b and dgrad.b formats that agree"
            )

    def _check_delayed(self) -> None:
        operands: tuple[OperandName, ...] = ("x", "w", "dy")
        read = {name: [f for f in self.formats(name) if f is not None] for name in operands}
        if not any(read.values()):
            raise Float8ConfigError(f"recipe {self.name!r}: delayed scaling of no GEMM; leave one in float8")
        for name, formats in read.items():
            one_scale = all(f.tile.is_whole and f.scale_rule.stored_as == torch.float32 for f in formats)
            if len(set(formats)) > 1 or not one_scale:
                raise Float8ConfigError(
                    f"recipe {self.name!r}: delayed scaling keeps one scale a tensor, but {name} is read as "
                    f"{' and '.join(map(str, formats))}; give both of its usages one format of Tile(ALL, ALL) with "
                    "float32 scales"
                )

    def formats(self, operand: OperandName) -> tuple[Float8Format | None, Float8Format | None]:
        """(rowwise, columnwise) formats of one of the three tensors; None where no float8 GEMM reads it."""
        match operand:
            case "x":
                return self.fprop.a, self.wgrad.b
            case "w":
                return self.fprop.b, self.dgrad.b
            case "dy":
                return self.dgrad.a, self.wgrad.a
            case _:
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
        changes: dict[str, Any] = dict.fromkeys(taken, HIGH_PRECISION_GEMM)
        return replace(self, name=name, delayed=None if taken == in_float8 else self.delayed, **changes)


def recipe_names() -> list[str]:
    """Every recipe that comes with f8sub: the file names of ``f8sub/recipes``."""
    return sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


def get_recipe(recipe: "Recipe | str", **options: Any) -> Recipe:
    """The recipe of that name; a ``Recipe`` of the caller's own needs no registration and is returned as is.

    Args:
        recipe: one of ``recipe_names()``, or a ``Recipe``.
        options: of the recipe's function ``recipe`` in ``f8sub/recipes``: ``get_recipe("gridquant", block=128)``.

    Raises:
        Float8ConfigError: no such name or option, and the message lists the valid ones; or no such value of one.
    """
    if isinstance(recipe, Recipe):
        if options:
            raise Float8ConfigError(
                f"options {sorted(options)} go with a recipe's name, got {recipe.name!r} itself"
            )
        return recipe
    if recipe not in recipe_names():
        raise Float8ConfigError(
            f"unknown recipe {recipe!r}; choose one of {recipe_names()} or pass an f8sub.Recipe"
        )
    module: Any = importlib.import_module(f"{recipes.__name__}.{recipe}")
    if not options:
        return cast(Recipe, module.RECIPE)
    valid = inspect.signature(module.recipe).parameters
    if unknown := sorted(set(options) - set(valid)):
        raise Float8ConfigError(f"recipe {recipe!r} has no options {unknown}; it has {list(valid) or 'none'}")
    for name, value in options.items():
        if isinstance(valid[name].default, bool) and not isinstance(value, bool):
            raise Float8ConfigError(f"option {name} of recipe {recipe!r} is True or False, got {value!r}")
    return cast(Recipe, module.recipe(**options))
