"""The warning of GEMMs that run by the reference backend on a GPU, where nobody asked for that."""

import warnings
from collections.abc import Iterable, Sequence

import torch
from typing_extensions import override

from f8sub.errors import Float8Warning
from f8sub.kernels.gemm.select import REFERENCE, Plan
from f8sub.recipe import get_recipe, recipe_names
from f8sub.weights.conversion import Conversion, LayerGuest

REFERENCE_TIMES_BF16 = 30
"""How many times as long as bf16 a layer takes on a GPU whose GEMMs are the reference's.

Source: ``scripts/bench/small_layers.py`` on an H200, 2026-11-23, forward and backward of 4096x4096 with 8192 tokens in
eager code: 30 times with e8m0 scales of 1x32, 37 times with e2m1.
"""


def reference_warning(plans: Iterable[Plan]) -> str | None:
    """What to tell users whose GEMMs run by the reference on a GPU unasked; None where no GEMM does."""
    slow = {
        plan.recipe.name: plan
        for plan in plans
        if plan.device.type not in ("cpu", "meta")
        and plan.backend != REFERENCE
        and REFERENCE in plan.gemms.values()
    }
    if not slow:
        return None
    listed = "; ".join(
        f"{', '.join(gemm for gemm, used in plan.gemms.items() if used == REFERENCE)} of recipe {name!r}"
        for name, plan in slow.items()
    )
    device = next(iter(slow.values())).device
    plans_there = (Plan.make(get_recipe(name), device) for name in recipe_names())
    native = [plan.recipe.name for plan in plans_there if REFERENCE not in plan.gemms.values()]
    return (
        f"{listed}: no native float8 GEMM on {_shown(device)}, so the reference backend multiplies, which takes about "
        f"{REFERENCE_TIMES_BF16} times as long as bf16. Native there: {', '.join(native) or 'no recipe'}. "
        f"backend={REFERENCE!r} says that you want this, and ends the warning"
    )


def _shown(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (SM {major}.{minor}, CUDA {torch.version.cuda})"


class ReferenceWarning(LayerGuest):
    """What warns, once a conversion."""

    def __init__(self) -> None:
        self._warned = False

    @override
    def planned(self, conversion: Conversion, plans: Sequence[Plan]) -> None:
        if not self._warned and (message := reference_warning(plans)):
            self._warned = True
            warnings.warn(message, Float8Warning, stacklevel=4)
