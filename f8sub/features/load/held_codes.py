"""Codes of a checkpoint in the place of a frozen layer's weight, without values in high precision."""

from dataclasses import replace
from typing import Any

import torch

from f8sub.errors import Float8ConfigError
from f8sub.features.codes_alone.dropped_shard import LoadedCodes
from f8sub.features.primary_weights.masters import is_primary, to_codes
from f8sub.features.primary_weights.primary_weight import PrimaryWeight
from f8sub.formats import Float8Format, Operand, ScaleRule, Tile
from f8sub.kernels.gemm.select import Plan
from f8sub.linear.float8_linear import Float8Linear
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import is_dtensor
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.weight import local_tensor


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


def check_not_gathered(layer: Float8Linear) -> None:
    """Check that FSDP2 has nothing of a weight that is to become codes; Float8ConfigError where it has."""
    shard = layer.converted.record_of(layer, "weight").shard
    if shard is not None and shard.gathers:
        raise Float8ConfigError(
            f"{layer.fqn}: its weight was gathered before, and the codes of a frozen layer are loaded before the first "
            "forward; load right after fully_shard"
        )


def format_for(format: Float8Format, *, is_power_of_2: bool) -> Float8Format | None:
    """The format of codes with the scales that a checkpoint has; None where a recipe's cannot be stored so."""
    if is_power_of_2 or format.scale_rule is ScaleRule.FLOAT:
        return format
    return replace(format, scale_rule=ScaleRule.FLOAT) if format.scale_rule is ScaleRule.POWER_OF_2 else None


def hold(layer: Float8Linear, operand: Operand, offset: tuple[int, int]) -> None:
    """Make a layer's weight be codes, in memory of their own.

    Args:
        layer: one that ``can_hold`` them.
        operand: ``data`` of this rank's part, on its device, and all scales of the whole weight.
        offset: (row, column) in the whole weight at which the part begins.
    """
    recipe, format = layer.plan.recipe, operand.format
    if format != recipe.fprop.b:
        # Scales as the checkpoint has them; those of x and dy stay the recipe's.
        reads: dict[str, Any] = {"fprop": replace(recipe.fprop, b=format)}
        if recipe.dgrad.b is not None:
            reads["dgrad"] = replace(recipe.dgrad, b=replace(recipe.dgrad.b, scale_rule=format.scale_rule))
        recipe = replace(recipe, **reads)
        layer.plan = Plan.make(recipe, layer.plan.device, layer.plan.backend)
    record = layer.enter_weight()
    local: Any = local_tensor(layer.weight)
    if isinstance(local, MasterWeight):
        local.cell.record = record
        to_codes(layer.weight, layer.weight.dtype, may_replace=True)
        local = local_tensor(layer.weight)
    if not isinstance(local, PrimaryWeight):
        raise RuntimeError(f"{layer.fqn}: a {type(local).__name__} is no primary weight")
    primary = local.primary
    primary.record = record
    if is_dtensor(layer.weight):
        primary.drop(LoadedCodes(operand, offset))
    else:
        primary.drop(Float8Tensor(operand, None, primary.dtype))
