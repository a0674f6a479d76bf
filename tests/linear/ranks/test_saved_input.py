"""What is saved for backward under FSDP2: nothing of the weight."""

import torch

import f8sub
from tests import oracle
from tests.data_sets import gaussian, generator
from tests.layers import on_each_recipe
from tests.linear.test_saved_bytes import Saved, bytes_of_saved, leaf
from tests.models import Stack, seed_weights, shard


@on_each_recipe
def test_under_fsdp_all_that_is_left_of_the_weight_after_forward_is_its_shard(rank, world, recipe):
    """Unsharded codes that autograd saw are FSDP's to free; the shard in high precision is a parameter."""
    of_x, spec = bytes_of_saved(leaf(24, 64), recipe), oracle.spec_of(recipe, "x")
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(64, 96)), recipe=recipe))
    x = leaf(24, 64)
    f8sub.precompute_scales(model)
    saved = Saved(lambda: model(x), [])
    codes = saved.bytes_in(oracle.TORCH_DTYPES[spec.format], torch.uint8)
    assert codes == (0 if f8sub.get_recipe(recipe).wgrad.b is None else spec.code_bytes(64, 24))
    assert saved.bytes <= of_x + oracle.spec_of(recipe, "w").scale_bytes(96, 64) + 96 * 64 * 4 // 2
    saved.y.backward(gaussian(tuple(saved.y.shape), generator(3)))
