"""Codes of a checkpoint in the place of frozen experts' weights, without values in high precision."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from f8sub.checkpoint.gathered import Part
from f8sub.checkpoint.load_codes import (
    are_powers_of_2,
    check_not_gathered,
    put,
    recipe_for,
)
from f8sub.checkpoint.quantization_config import Source
from f8sub.convert.primary_weights import is_primary
from f8sub.experts.module import Float8Experts
from f8sub.formats import ALL, Operand
from f8sub.kernels.grouped.gemm import GroupedPlan
from f8sub.torch_compat import is_dtensor, param_dtypes
from f8sub.weights.weight import local_tensor


class Held(NamedTuple):
    """A weight of experts that keeps the file's codes.

    Attributes:
        plan: of its module, whose recipe reads the file's scales.
        scales: float32, a matrix of all experts' tiles, one expert's after the other's.
    """

    plan: GroupedPlan
    scales: torch.Tensor


def held_experts(
    sources: Mapping[Part, Sequence[Source]], scales_of: Callable[[Source], torch.Tensor]
) -> dict[Part, Held]:
    """The weights of experts that keep codes: those of modules whose every weight can.

    Args:
        sources: of every parameter.
        scales_of: the scales of a source, float32, (tiles along N, tiles along K).

    Raises:
        Float8ConfigError: one of them was gathered before.
    """
    of_module: dict[Float8Experts, list[Part]] = defaultdict(list)
    for part in sources:
        if isinstance(part.module, Float8Experts) and part.attribute in part.module.weights:
            of_module[part.module].append(part)
    found = {}
    for module, parts in of_module.items():
        if len(parts) < len(module.weights) or not all(_can_hold(part, sources[part]) for part in parts):
            continue
        matrices = {part: torch.cat([scales_of(each) for each in in_order(sources[part])]) for part in parts}
        is_power_of_2 = all(are_powers_of_2(scales) for scales in matrices.values())
        recipe = recipe_for(module.plan.recipe, is_power_of_2=is_power_of_2)
        if recipe is None:
            continue
        plan = module.plan
        if recipe is not plan.recipe:
            plan = GroupedPlan.make(recipe, plan.device, plan.backend)
        for part in parts:
            check_not_gathered(module, part.attribute)
            found[part] = Held(plan, matrices[part])
    return found


def in_order(sources: Sequence[Source]) -> list[Source]:
    """By expert, and by the rows of each."""
    return sorted(
        sources, key=lambda each: (each.piece.expert or 0, each.piece.rows.start if each.piece.rows else 0)
    )


def _can_hold(part: Part, sources: Sequence[Source]) -> bool:
    """Whether a weight is frozen and primary, and its codes lie in the file as they are multiplied."""
    module, weight = part.module, part.tensor
    if not isinstance(module, Float8Experts) or weight.requires_grad or not is_primary(weight):
        return False
    format, rows = module.format_of(part.attribute), weight.shape[1]
    if format is None or format.dtype != torch.float8_e4m3fn or module.weights[part.attribute]:
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
        edge = rows if tile.rows == ALL else tile.rows
        if piece.expert * rows + piece.rows.start != ends or piece.rows.start % edge:
            return False
        ends += piece.rows.stop - piece.rows.start
    return ends == weight.shape[0] * rows


def hold_experts(part: Part, held: Held, codes: Sequence[torch.Tensor], first: int) -> None:
    """Make a weight be codes, in memory of their own.

    Args:
        part: one of ``held_experts``.
        held: what that says of it.
        codes: of this rank's experts, (rows, K), in their order.
        first: this rank's first expert.
    """
    module, weight = part.module, part.tensor
    if not isinstance(module, Float8Experts):
        raise RuntimeError(f"{part.name} is not a weight of experts")
    if module.plan is not held.plan:
        module.plan = held.plan
        module.enter_weights()
    format, local = module.format_of(part.attribute), local_tensor(weight)
    if format is None:
        raise RuntimeError(f"{part.name} is read in high precision")
    none = torch.empty((0, weight.shape[-1]), dtype=format.dtype, device="cpu")
    data = torch.cat([none, *codes]).to(local.device)
    scales = held.scales.to(local.device, format.scale_rule.stored_as)
    put(module, part.attribute, Operand(data, scales, format), (first * weight.shape[1], 0))
