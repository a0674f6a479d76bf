"""Weights with leading dimensions, several of one module: gathered codes and scales are those of the whole weights."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import f8sub
from f8sub.kernels.quantize import quantize
from f8sub.weights.conversion import Conversion
from f8sub.weights.master_weight import MasterWeight
from tests.data_sets import gaussian, generator

SHAPES = {"up": (24, 32), "down": (32, 24)}


class Experts(nn.Module):
    """Two stacked weights, entered by their records as a feature would."""

    def __init__(self, experts: int, format: f8sub.Float8Format) -> None:
        super().__init__()
        self.converted = Conversion()
        for seed, (name, (rows, cols)) in enumerate(SHAPES.items()):
            # One scale an expert is a tile of an expert's rows.
            tile = dataclasses.replace(format.tile, rows=rows) if format.tile.is_whole else format.tile
            own = dataclasses.replace(format, tile=tile)
            record = self.converted.add(self, name, f"experts.{name}", own, gathered=True)
            values = gaussian((experts * rows, cols), generator(seed)).view(experts, rows, cols)
            master = MasterWeight(values)
            master.cell.record = record
            setattr(self, name, nn.Parameter(master))
        Conversion.see(self)

    def weight_described(self, name: str, device: torch.device) -> dict[str, str]:
        return {"shape": str(tuple(getattr(self, name).shape))}


def gathered(rank: int, world: int, experts: int, format: f8sub.Float8Format) -> tuple[int, list[bool]]:
    """Number of all-reduces, and whether shapes, codes and scales are those of the matrix of all experts."""
    model = Experts(experts, format)
    whole = {}
    for name in SHAPES:
        matrix = getattr(model, name).detach().plain.flatten(0, 1)
        whole[name] = quantize(matrix, model.converted.record_of(model, name).format, None).rowwise
    fully_shard(model)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        f8sub.precompute_scales(model)
        model.unshard()
    same = []
    for name, (rows, cols) in SHAPES.items():
        weight, expected = getattr(model, name), whole[name]
        same.append(weight.shape == (experts, rows, cols))
        same.append(torch.equal(weight.rowwise.data.view(torch.uint8), expected.data.view(torch.uint8)))
        same.append(torch.equal(weight.rowwise.scale_inv.float(), expected.scale_inv.float()))
    return all_reduce.call_count, same


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
@pytest.mark.parametrize(("world", "experts"), [(2, 4), (3, 5), (3, 2)])
def test_stacked_weights_are_gathered_like_matrices(ranks, world, experts, recipe):
    """Mixed: experts that the ranks divide and do not, and a rank that has none."""
    format = f8sub.get_recipe(recipe).fprop.b
    for reductions, same in ranks(world, gathered, experts, format):
        assert reductions == 1
        assert all(same), same
