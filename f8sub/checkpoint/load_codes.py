"""Codes in the place of a frozen linear layer's weight, and what experts do likewise."""

from dataclasses import replace
from typing import Any

import torch

from f8sub.convert.primary_weights import is_primary, to_codes
from f8sub.errors import Float8ConfigError
from f8sub.formats import Operand, ScaleRule, Tile, why_not_derivable
from f8sub.kernels.gemm.select import Plan
from f8sub.linear.float8_linear import Float8Linear
from f8sub.recipe import Recipe
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import is_dtensor
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.primary_weight import LoadedCodes, PrimaryWeight
from f8sub.weights.weight import local_tensor


def are_powers_of_2(scales: torch.Tensor) -> bool:
    """Whether all of them, float32, are."""
    return bool(((scales.view(torch.int32) & 0x7FFFFF) == 0).all())


def can_hold(layer: torch.nn.Module, tile: Tile) -> bool:
    """Whether a layer's weight may be a checkpoint's e4m3 codes with scales of ``tile``, and nothing else.

    It is frozen, was converted with ``primary_weights=True``, and its recipe has the checkpoint's tiles.
    """
    if not isinstance(layer, Float8Linear) or layer.weight.requires_grad or not is_primary(layer.weight):
        return False
    format = layer.plan.recipe.fprop.b
    return (
        format is not None
        and format.dtype == torch.float8_e4m3fn
        and format.tile == tile
        and not format.hadamard
    )


def check_not_gathered(module: Any, name: str = "weight") -> None:
    """Check that FSDP2 has nothing of a weight that is to become codes; Float8ConfigError where it has."""
    shard = module.converted.record_of(module, name).shard
    if shard is not None and shard.gathers:
        raise Float8ConfigError(
            f"{module.fqn}: its weight was gathered before, and the codes of a frozen layer are loaded before the "
            "first forward; load right after fully_shard"
        )


def plan_for(layer: Float8Linear, *, is_power_of_2: bool) -> Plan | None:
    """The plan of a layer whose weight has the scales of a checkpoint; None where its recipe cannot read these.

    Raises:
        Float8ConfigError: the backend that was asked for has no such product.
    """
    plan = layer.plan
    recipe = recipe_for(plan.recipe, is_power_of_2=is_power_of_2)
    if recipe is None or recipe is plan.recipe:
        return None if recipe is None else plan
    return Plan.make(recipe, plan.device, plan.backend)


def recipe_for(recipe: Recipe, *, is_power_of_2: bool) -> Recipe | None:
    """A recipe whose weights have the scales of a checkpoint, those of x and dy as they were; None where none can."""
    row, col = recipe.formats("w")
    if row is None or is_power_of_2 or row.scale_rule is ScaleRule.FLOAT:
        return recipe
    if row.scale_rule is not ScaleRule.POWER_OF_2:
        return None  # whose scales are stored as exponents
    row = replace(row, scale_rule=ScaleRule.FLOAT)
    reads: dict[str, Any] = {"fprop": replace(recipe.fprop, b=row)}
    if col is not None:
        col = replace(col, scale_rule=ScaleRule.FLOAT)
        if why_not_derivable(row, col) is not None:
            return None
        reads["dgrad"] = replace(recipe.dgrad, b=col)
    return replace(recipe, **reads)


def hold(layer: Float8Linear, plan: Plan, operand: Operand, offset: tuple[int, int]) -> None:
    """Make a layer's weight be codes, in memory of their own.

    Args:
        layer: one that ``can_hold`` them.
        plan: of ``plan_for``.
        operand: ``data`` of this rank's part, on its device, and all scales of the whole weight.
        offset: (row, column) in the whole weight at which the part begins.
    """
    layer.plan = plan
    layer.enter_weight()
    put(layer, "weight", operand, offset)


def put(module: Any, name: str, operand: Operand, offset: tuple[int, int]) -> None:
    """Put codes in a weight's place; its record is the one that its module entered last. See ``hold``."""
    record, weight = module.converted.record_of(module, name), getattr(module, name)
    local: Any = local_tensor(weight)
    if isinstance(local, MasterWeight):
        local.cell.record = record
        to_codes(weight, weight.dtype, may_replace=True)
        weight = getattr(module, name)
        local = local_tensor(weight)
    if not isinstance(local, PrimaryWeight):
        raise RuntimeError(f"{module.fqn}: a {type(local).__name__} is no primary weight")
    primary = local.primary
    primary.record = record
    if is_dtensor(weight):
        primary.drop(LoadedCodes(operand, offset))
    else:
        primary.drop(Float8Tensor(operand, None, primary.dtype))
