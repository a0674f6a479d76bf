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

from collections.abc import Callable
from typing import Literal

import torch

from f8sub.errors import Float8ConfigError
from f8sub.formats import ALL, Float8Format, Tile
from f8sub.recipe import DelayedScaling, GemmSpec, Recipe

E4M3 = Float8Format(torch.float8_e4m3fn, Tile(ALL, ALL))
E5M2 = Float8Format(torch.float8_e5m2, Tile(ALL, ALL))

E5M2_HEADROOM = 4
"""Powers of two that a dy may grow by, from the largest of its past, before it saturates.

In the first 15 steps of a Llama 3 8B dy outgrew its past by up to 19 times, in 78 % of the layers at the second step.
What they cost is at the other end: normal numbers reach down to 2**-26 of the largest, not 2**-30; e4m3's to 2**-15.
"""

_DY = {"E4M3": E4M3, "HYBRID": E5M2}
"""Format of dy by TransformerEngine's names; x and w are e4m3 in both."""


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
    """TransformerEngine's ``DelayedScaling(...)``; parameters that are not explained here are those of ours.

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
