"""NaN or infinity in weights of replicas, and in shards that no table covers."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.data_sets import gaussian, generator
from tests.layers import dy_of
from tests.models import shard
from tests.weights.test_held_weights import error_of, spoil, stack


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_bad_element_of_replicas_is_told_on_every_rank(rank, world, recipe):
    """With delayed scaling by the histories, which looked at the weights when the optimizer stepped."""
    model = stack(recipe)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    y = ddp(gaussian((16, 32), generator(rank)))
    y.backward(dy_of(y))
    if rank == 1:
        model.layers[1].weight.grad[2, 2] = torch.inf
    dist.all_reduce(model.layers[1].weight.grad)
    optimizer.step()
    messages = [error_of(ddp), error_of(ddp)]
    assert (messages[0] == "") == (recipe == "rowwise")
    for told in filter(None, messages):
        assert "layers.1 (" in told
        assert "layers.2" not in told


def test_a_bad_element_of_a_shard_that_no_table_covers_is_told_by_the_rank_that_holds_it(rank, world):
    model = shard(stack(float8_all_gather=False))
    if rank == 1:
        spoil(model.layers[0].weight.to_local(), torch.nan)
    assert error_of(model) == ""
    told = error_of(model)
    assert ("master weight of layers.0 (on this rank)" in told) if rank == 1 else told == ""
