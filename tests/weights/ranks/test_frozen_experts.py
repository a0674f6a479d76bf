"""Frozen experts under FSDP2: a byte an element is kept and sent, and the steps are those of high precision."""

import gc

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.multiprocessing.reductions import StorageWeakRef

import f8sub
from tests.experts.ranks.test_experts_sharded import converted, sharded, trained
from tests.models import equal
from tests.selection import long_but
from tests.wire import Wire

FEW = [(2, 3, "tensorwise", False), (3, 2, "rowwise", False), (2, 3, "rowwise", True)]
MORE = [(3, 5, "tensorwise"), (3, 2, "tensorwise"), (3, 5, "blockwise")]
CASES = long_but(FEW, [*FEW, *((world, experts, recipe, False) for world, experts, recipe in MORE)])
"""(ranks, experts, recipe, by rows): experts that the ranks do not divide, and a rank that has none."""


@pytest.mark.parametrize(("world", "experts", "recipe", "by_rows"), CASES)
def test_frozen_experts_keep_and_send_codes(rank, world, experts, recipe, by_rows):
    """Three steps in which the head learns and the experts are codes alone after the first."""
    options = {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 3 else None} if by_rows else {}
    models = []
    for primary in (True, False):
        made = converted(experts, recipe, primary_weights=primary)
        made.experts.requires_grad_(False)
        made.head.requires_grad_(not primary)  # whose optimizer would have to be MasterWeights
        models.append(sharded(made, **options))
    model, plain = models
    plain.head.requires_grad_(False)
    parameters = list(model.experts.parameters())
    f8sub.drop_high_precision(model)
    held = [StorageWeakRef(p._local_tensor.primary.master.plain.untyped_storage()) for p in parameters]
    nothing = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert equal(trained(model, experts, optimizer=nothing), trained(plain, experts, optimizer=nothing))
    gc.collect()
    assert all(each.expired() for each in held)
    values = [p.full_tensor() for p in parameters]
    sent = []
    for each in (model, plain):
        f8sub.precompute_scales(each)
        with Wire() as wire:
            each.experts.unshard()
        sent.append(wire.gathered)
    assert sent[0] == sent[1]
    for parameter, value in zip(model.experts.parameters(), values, strict=True):
        assert torch.equal(parameter.dequantize(), value)
