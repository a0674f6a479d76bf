"""Experts of torchtitan 0.3 as one layer, whose SwiGLU is computed where its result is cast; and their tokens' way.

Their class multiplies by a method that a float8 class has, so they convert without this. What lies between two calls of
it is torchtitan's code.
"""

from collections.abc import Mapping
from typing import Any

import torch

import f8sub
from f8sub.experts.seams import is_registered

KNOWN = frozenset({
    "isinstance", "w1_EFD", "DTensor", "to_local", "w2_EDF", "w3_EFD", "torch", "cumsum", "int32", "get_spmd_backend",
    "spmd", "is_type_checking", "spmd_mesh_size", "mutate_type", "P", "V", "F", "silu", "_grouped_mm", "bfloat16",
    "transpose", "type_as",
})  # fmt: skip
"""The names in the code of ``GroupedExperts.forward`` of torchtitan 0.3.0, which is replaced."""


def register_grouped_experts() -> None:
    """Have ``GroupedExperts`` of the torchtitan that is installed run as one layer, if its forward is the known one.

    What a user registered for the class stays.
    """
    try:
        from torchtitan.models.common import moe
    except ImportError:
        return
    cls = getattr(moe, "GroupedExperts", None)
    code = getattr(getattr(cls, "forward", None), "__code__", None)
    if code is None or frozenset(code.co_names) != KNOWN or is_registered(moe.GroupedExperts):
        return

    def forward(module: Any, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        if moe.get_spmd_backend() == "spmd_types" and moe.spmd.is_type_checking():
            # Its checker knows each product.
            found: torch.Tensor = moe.GroupedExperts.forward(module, x, num_tokens_per_expert)
            return found
        ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        # torchtitan multiplies in bfloat16, whatever the parameters are kept in.
        y = f8sub.grouped_swiglu(x.bfloat16(), module.w1_EFD, module.w3_EFD, module.w2_EDF, ends)
        return y.type_as(x)

    f8sub.register_experts(
        moe.GroupedExperts, weights=("w1_EFD", "w2_EDF", "w3_EFD"), forward=forward, down="w2_EDF"
    )


def dispatch_in_float8(
    model: torch.nn.Module, recipe: f8sub.Recipe | Mapping[str, f8sub.Recipe], *, may_travel: bool
) -> None:
    """Have tokens travel to experts of other ranks in float8, by the option ``dispatch_tokens_in_float8``.

    Args:
        model: as torchtitan built it.
        recipe: of all layers.
        may_travel: False where the job is known to have all experts on each rank.

    Raises:
        Float8ConfigError: they do not travel, several recipes, or as of ``f8sub.dispatch_tokens_in_float8``.
    """
    if isinstance(recipe, Mapping):
        raise f8sub.Float8ConfigError(
            "dispatch_tokens_in_float8 takes one recipe, rowwise or blockwise, and recipe_name is a mapping"
        )
    if not may_travel:
        raise f8sub.Float8ConfigError(
            "dispatch_tokens_in_float8 is for jobs whose tokens travel to experts of other ranks; set "
            "parallelism.expert_parallel_degree, or leave the option out"
        )
    f8sub.dispatch_tokens_in_float8(model, recipe)
