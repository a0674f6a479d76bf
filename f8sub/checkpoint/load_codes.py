"""A checkpoint's float8 data in place of frozen weights of linear layers and of experts, which then have no values."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from f8sub.checkpoint.gathered import NamedTensor
from f8sub.checkpoint.quantization_config import StoredTensor
from f8sub.convert.primary_weights import is_primary, to_codes
from f8sub.errors import Float8ConfigError
from f8sub.formats import ALL, Operand, ScaleRule, Tile, why_not_derivable
from f8sub.kernels.gemm.select import Plan
from f8sub.linear.float8_linear import Float8Linear
from f8sub.recipe import Recipe
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import is_dtensor, param_dtypes
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.primary_weight import LoadedCodes, PrimaryWeight
from f8sub.weights.weight import local_tensor


def are_powers_of_2(scales: torch.Tensor) -> bool:
    """Return whether all these scales, float32, are powers of two."""
    # A power of two has no bits in float32's mantissa of 23.
    return bool(((scales.view(torch.int32) & 0x7FFFFF) == 0).all())


def can_hold(layer: torch.nn.Module, tile: Tile) -> bool:
    """Return whether a layer's weight may be only a checkpoint's e4m3 data with scales of ``tile``.

    It is frozen, was converted with ``primary_weights=True``, and its recipe has the checkpoint's tiles.
    """
    if not isinstance(layer, Float8Linear) or layer.weight.requires_grad or not is_primary(layer.weight):
        return False
    format = layer._f8sub.plan.recipe.fprop.b
    return (
        format is not None
        and format.dtype == torch.float8_e4m3fn
        and format.tile == tile
        and not format.hadamard
    )


def check_not_gathered(module: Any, name: str = "weight") -> None:
    """Check that FSDP2 gathered nothing of a weight that is to become float8 data; else Float8ConfigError."""
    shard = module._f8sub.conversion.record_of(module, name).shard
    if shard is not None and shard.gathers:
        raise Float8ConfigError(
            f"{module._f8sub.fqn}: its weight was gathered before, and the codes of a frozen layer are loaded before "
            "the first forward; load right after fully_shard"
        )


def plan_for(plan: Plan, *, is_power_of_2: bool) -> Plan | None:
    """Return the plan where weights have a checkpoint's scales; None where the recipe of ``plan`` cannot read these.

    Raises:
        Float8ConfigError: the backend that was asked for has no such product.
    """
    recipe = recipe_for(plan.recipe, is_power_of_2=is_power_of_2)
    if recipe is None or recipe is plan.recipe:
        return None if recipe is None else plan
    return plan.with_recipe(recipe)


def recipe_for(recipe: Recipe, *, is_power_of_2: bool) -> Recipe | None:
    """Return a recipe whose weights have a checkpoint's scales, x and dy as they were; None where there is none."""
    row, col = recipe.formats("w")
    # Powers of two are float32 scales too, so a recipe of either kind reads them.
    if row is None or is_power_of_2 or row.scale_rule is ScaleRule.FLOAT:
        return recipe
    if row.scale_rule is not ScaleRule.POWER_OF_2:
        return None  # whose scales are stored as exponents
    row = replace(row, scale_rule=ScaleRule.FLOAT)
    reads: dict[str, Any] = {"fprop": replace(recipe.fprop, b=row)}
    if col is not None:
        col = replace(col, scale_rule=ScaleRule.FLOAT)
        # dgrad's columnwise operand is derived from these data, which needs square tiles
        # unless scales are powers of two.
        if why_not_derivable(row, col) is not None:
            return None
        reads["dgrad"] = replace(recipe.dgrad, b=col)
    return replace(recipe, **reads)


def hold(layer: Float8Linear, plan: Plan, operand: Operand, offset: tuple[int, int]) -> None:
    """Turn a layer's weight into float8 data, in memory of their own.

    Args:
        layer: one that ``can_hold`` them.
        plan: of ``plan_for``.
        operand: ``data`` of this rank's part, on its device, and all scales of the whole weight.
        offset: (row, column) in the whole weight at which the part begins.
    """
    layer._f8sub.plan = plan
    # The record's format is that of the plan: it is entered again with the file's kind of scales.
    layer._f8sub.enter_weights(layer)
    put(layer, "weight", operand, offset)


def put(module: Any, name: str, operand: Operand, offset: tuple[int, int]) -> None:
    """Put float8 data in a weight's place; its record is the one that its module entered last. See ``hold``."""
    record, weight = module._f8sub.conversion.record_of(module, name), getattr(module, name)
    local: Any = local_tensor(weight)
    if isinstance(local, MasterWeight):
        # The record that was just entered, which the next line makes the primary weight's.
        local.cell.record = record
        to_codes(weight, weight.dtype, may_replace=True)
        weight = getattr(module, name)
        local = local_tensor(weight)
    if not isinstance(local, PrimaryWeight):
        raise RuntimeError(f"{module._f8sub.fqn}: a {type(local).__name__} is no primary weight")
    primary = local.primary
    primary.record = record
    if is_dtensor(weight):
        # A shard exists only once FSDP2 asks for the weight: it takes the data over then.
        primary.drop(LoadedCodes(operand, offset))
    else:
        primary.drop(Float8Tensor(operand, None, primary.dtype))


class Held(NamedTuple):
    """Describes a weight of experts that keeps the file's data.

    Attributes:
        plan: of its module, whose recipe reads the file's scales.
        scales: float32, a matrix of all experts' tiles, one expert's after the other's.
    """

    plan: Plan
    scales: torch.Tensor


def held_experts(
    sources: Mapping[NamedTensor, Sequence[StoredTensor]], scales_of: Callable[[StoredTensor], torch.Tensor]
) -> dict[NamedTensor, Held]:
    """Return the weights of experts that keep the file's data: those of modules whose every weight can.

    Args:
        sources: of every parameter.
        scales_of: the scales of a source, float32, (tiles along N, tiles along K).

    Raises:
        Float8ConfigError: one of them was gathered before.
    """
    of_module: dict[Any, list[NamedTensor]] = defaultdict(list)
    for part in sources:
        if part.is_of_experts:
            of_module[part.module].append(part)
    found = {}
    for module, parts in of_module.items():
        if len(parts) < len(module._f8sub.weights) or not all(
            _can_hold(part, sources[part]) for part in parts
        ):
            continue
        matrices = {part: torch.cat([scales_of(each) for each in in_order(sources[part])]) for part in parts}
        # One plan serves all weights of a module, so one of them decides for all.
        is_power_of_2 = all(are_powers_of_2(scales) for scales in matrices.values())
        plan = plan_for(module._f8sub.plan, is_power_of_2=is_power_of_2)
        if plan is None:
            continue
        for part in parts:
            check_not_gathered(module, part.attribute)
            found[part] = Held(plan, matrices[part])
    return found


def in_order(sources: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Sort sources by expert, and by the rows of each."""
    return sorted(
        sources, key=lambda each: (each.piece.expert or 0, each.piece.rows.start if each.piece.rows else 0)
    )


def _can_hold(part: NamedTensor, sources: Sequence[StoredTensor]) -> bool:
    """Return whether a weight is frozen and primary, and the file has its data as they are multiplied."""
    module: Any = part.module
    weight = part.tensor
    if not part.is_of_experts or weight.requires_grad or not is_primary(weight):
        return False
    format, rows = module._f8sub.format_of(module, part.attribute), weight.shape[1]
    if format is None or format.dtype != torch.float8_e4m3fn or part.is_transposed:
        return False
    if is_dtensor(weight):
        cut = [placement for placement in weight.placements if not placement.is_replicate()]
        if len(cut) > 1 or not all(placement.is_shard(0) for placement in cut):
            return False
        if (module, part.attribute) not in param_dtypes([module]):  # no FSDP2 puts the parts together
            return False
    ends = 0
    for source in in_order(sources):  # all rows of all experts, cut between tiles
        piece, tile = source.piece, source.tile
        if source.scale is None or tile != format.tile or piece.expert is None or piece.rows is None:
            return False
        # A tile of all rows ends with the expert's matrix, not with gate or up.
        edge = rows if tile.rows == ALL else tile.rows
        if piece.expert * rows + piece.rows.start != ends or piece.rows.start % edge:
            return False
        ends += piece.rows.stop - piece.rows.start
    return ends == weight.shape[0] * rows


def hold_experts(part: NamedTensor, held: Held, codes: Sequence[torch.Tensor], first: int) -> None:
    """Turn a weight of experts into float8 data, in memory of their own.

    Args:
        part: one of ``held_experts``.
        held: what that returned for it.
        codes: of this rank's experts, (rows, K), in their order.
        first: this rank's first expert.
    """
    module: Any = part.module
    weight = part.tensor
    if module._f8sub.plan is not held.plan:
        module._f8sub.plan = held.plan
        module._f8sub.enter_weights(module)
    format, local = module._f8sub.format_of(module, part.attribute), local_tensor(weight)
    if format is None:
        raise RuntimeError(f"{part.name} is read in high precision")
    # A rank may have no expert, and cat takes no empty list.
    none = torch.empty((0, weight.shape[-1]), dtype=format.dtype, device="cpu")
    data = torch.cat([none, *codes]).to(local.device)
    scales = held.scales.to(local.device, format.scale_rule.stored_as)
    put(module, part.attribute, Operand(data, scales, format), (first * weight.shape[1], 0))
