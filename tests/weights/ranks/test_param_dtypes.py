"""Parameters of one FSDP2 group with dtypes of their own, by ``param_dtype_override_fn``: those of unsharded layers."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import f8sub
from tests.mixed_dtypes import (
    dtype_of,
    gradients,
    names_of_others,
    needs_overrides,
    overriding,
    own_gradients,
    plain,
    products,
    sharded,
    unsharded,
)
from tests.models import equal, float8_layers, shard_of
from tests.weights.ranks.test_gathered_weight import differences
from tests.wire import on_each

pytestmark = needs_overrides
on_each_recipe = on_each(("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"))


@on_each(("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"))
def test_each_weight_is_rounded_to_its_own_dtype(rank, world, recipe):
    """Gathered codes are those of the whole weight after that."""
    model = sharded(recipe)
    f8sub.precompute_scales(model)
    assert {shard_of(layer).dtype for layer in float8_layers(model)} == {torch.float32, torch.bfloat16}
    for block in model.blocks:
        block.unshard()
    wrong = []
    for (name, found), right in zip(model.named_parameters(), plain().parameters(), strict=True):
        assert found.dtype is dtype_of(name), name
        if found.dim() == 2:
            wrong += [(name, each) for each in differences(found.data, recipe, right.to(found.dtype))]
    assert wrong == []


@on_each_recipe
def test_products_and_gradients_are_those_of_unsharded_layers(rank, world, recipe):
    right = products(unsharded(recipe), rank)
    # Two ranks have one order of adding.
    mean = {name: sum(g.float() for g in each) / world for name, each in own_gradients(world, recipe).items()}
    for all_gather in (True, False):
        for reduce_dtype in (torch.float32, None):  # by the parameters' own dtype
            model = sharded(recipe, all_gather=all_gather, reduce_dtype=reduce_dtype)
            f8sub.precompute_scales(model)
            for _ in range(2):  # the second time into the same memory
                model.zero_grad()
                assert equal(products(model, rank), right)
                assert names_of_others(gradients(model), mean) == []


def test_ranks_that_override_otherwise_are_refused(rank, world):
    model = f8sub.convert_to_float8(plain(), recipe="tensorwise")

    def dtype(name: str) -> torch.dtype:
        return torch.float32 if rank == 1 and name == "blocks.0.up.weight" else torch.bfloat16

    fully_shard(model, mp_policy=overriding(model, dtype))
    with pytest.raises(
        f8sub.Float8RankMismatchError, match=r"blocks\.0\.up: rank 0: param_dtype torch\.bfloat16"
    ):
        f8sub.precompute_scales(model)
