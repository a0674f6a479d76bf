"""One scale a tensor, made of its amaxes of past steps: TransformerEngine's DelayedScaling.

Source: TransformerEngine's recipe of the same name, with the parameters of its 1.x releases (``interval`` and
``override_linear_precision`` are gone from 2.x), and its formula and history layout: see ``DelayedScaling``.
Where it differs:

- A tensor without a scale yet is scaled by its current amax, not by 1, which flushes a dy below e5m2's 2**-17 to zero.
- A non-finite amax is reported and left out; in TransformerEngine one infinity freezes the scale until it has left
  the history. Values that a scale of the past cannot hold saturate.
- The histories roll once per optimizer step, not per microbatch, and ``eval()`` and ``no_grad`` leave them alone.
- A weight's current amax is known before it is cast, so it enters the history first, and its scale is never larger
  than that amax allows: the weight does not saturate.
- dy in e5m2 has four powers of two of headroom, see ``E5M2_HEADROOM``; ``dy_margin=0`` is TransformerEngine's.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from f8sub.errors import Float8ConfigError
from f8sub.formats import ALL, Float8Format, Tile
from f8sub.recipe import GemmSpec, OperandName, Recipe

E4M3 = Float8Format(torch.float8_e4m3fn, Tile(ALL, ALL))
E5M2 = Float8Format(torch.float8_e5m2, Tile(ALL, ALL))

E5M2_HEADROOM = 4
"""Powers of two that a dy may grow by, from the largest of its past, before it saturates.

In the first 15 steps of a Llama 3 8B dy outgrew its past by up to 19 times, in 78 % of the layers at the second step.
What they cost is at the other end: normal numbers reach down to 2**-26 of the largest, not 2**-30; e4m3's to 2**-15.
"""

_DY = {"E4M3": E4M3, "HYBRID": E5M2}
"""Format of dy by TransformerEngine's names; x and w are e4m3 in both."""

MOST_MARGIN = 127
"""More powers of two of headroom than that leave every scale at its smallest, whatever the amax."""


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
            # Not isinstance: True is an int.
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
            # Recipes are keys of dicts.
            if not isinstance(algorithm, Hashable):
                raise Float8ConfigError(
                    f"{name} is a callable that identifies recipes, and {algorithm!r} has no hash; define __hash__, "
                    "or pass a function"
                )
        if not isinstance(self.reduce_amax, bool):
            raise Float8ConfigError(f"reduce_amax is True or False, got {self.reduce_amax!r}")

    def __repr__(self) -> str:
        """The fields; callables by name, which all ranks share, not by address."""

        def shown(value: Any) -> str:
            return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)

        values = (f"{one.name}={shown(getattr(self, one.name))}" for one in fields(self))
        return f"DelayedScaling({', '.join(values)})"

    def margin_of(self, operand: OperandName) -> float:
        """Powers of two of headroom of one operand's scales."""
        return max(self.margin, self.dy_margin) if operand == "dy" else self.margin

    def check(self, recipe: Recipe) -> None:
        """Raise a ``Float8ConfigError`` if a tensor of the recipe has more than one scale, or none has any."""
        read = {name: [f for f in recipe.formats(name) if f is not None] for name in get_args(OperandName)}
        if not any(read.values()):
            raise Float8ConfigError(
                f"recipe {recipe.name!r}: delayed scaling of no GEMM; leave one in float8"
            )
        for name, formats in read.items():
            # A history is of one tensor, so both of its usages share the scale.
            one_scale = all(f.tile.is_whole and f.scale_rule.stored_as == torch.float32 for f in formats)
            if len(set(formats)) > 1 or not one_scale:
                raise Float8ConfigError(
                    f"recipe {recipe.name!r}: delayed scaling keeps one scale per tensor, but {name} is read as "
                    f"{' and '.join(map(str, formats))}; give both of its usages one format of Tile(ALL, ALL) with "
                    "float32 scales"
                )


def recipe(  # noqa: PLR0913  (TransformerEngine's parameters)
    *,
    margin: float = 0,
    dy_margin: float | None = None,
    interval: int = 1,
    fp8_format: str = "HYBRID",
    amax_history_len: int = 1024,
    amax_compute_algo: Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor] = "max",
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None,
    reduce_amax: bool = True,
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False),
) -> Recipe:
    """TransformerEngine's ``DelayedScaling(...)``; parameters that are not explained here are those of ours, above.

    ``dy_margin=None`` is ``E5M2_HEADROOM`` where dy is e5m2, else 0; ``fp8_format`` is ``"HYBRID"`` (dy in e5m2) or
    ``"E4M3"``; ``override_linear_precision`` says which of (fprop, dgrad, wgrad) stay in high precision. A value that
    cannot be used is a ``Float8ConfigError``.
    """
    if not isinstance(fp8_format, str) or fp8_format not in _DY:
        raise Float8ConfigError(
            f"fp8_format is one of {list(_DY)}, got {fp8_format!r}; e5m2 keeps two bits of an activation's mantissa"
        )
    keep = override_linear_precision
    if not (isinstance(keep, (tuple, list)) and len(keep) == 3 and all(isinstance(k, bool) for k in keep)):
        raise Float8ConfigError(
            f"override_linear_precision is three of True and False, for fprop, dgrad and wgrad, got {keep!r}"
        )
    if all(keep):
        raise Float8ConfigError(
            "override_linear_precision keeps all three GEMMs in high precision, so that nothing is scaled; leave one "
            "in float8, or do not convert the layers"
        )
    dy = _DY[fp8_format]
    if dy_margin is None:
        dy_margin = E5M2_HEADROOM if dy is E5M2 else 0
    scaling = DelayedScaling(
        margin=margin,
        dy_margin=dy_margin,
        interval=interval,
        amax_history_len=amax_history_len,
        amax_compute_algo=amax_compute_algo,
        scaling_factor_compute_algo=scaling_factor_compute_algo,
        reduce_amax=reduce_amax,
    )
    fprop, backward = GemmSpec(a=E4M3, b=E4M3, fast_accum=True), GemmSpec(a=dy, b=E4M3)
    made = Recipe(name="delayed", fprop=fprop, dgrad=backward, wgrad=backward, delayed=scaling)
    return made.with_high_precision(fprop=keep[0], dgrad=keep[1], wgrad=keep[2])


RECIPE = recipe()
