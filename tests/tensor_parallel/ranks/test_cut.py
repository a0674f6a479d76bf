"""A matrix that tensor parallelism cuts has the amaxes of the whole one."""

import pytest
import torch

from f8sub import ALL, Tile
from f8sub.linear.dtensor import Cut
from tests.data_sets import gaussian, generator
from tests.tensor_parallel.models import mesh_of


@pytest.mark.parametrize("world", [4])
def test_parts_of_one_tile_have_its_amax(rank, world):
    """Two ranks share each tile of 128 columns, and all of them the tile of all columns."""
    x = gaussian((6, 256), generator(0))
    cut = Cut.of(mesh_of(world), 1, 256)
    own = x[:, 64 * rank : 64 * rank + 64].abs().amax(1, keepdim=True)
    of_tile = x[:, 128 * (rank // 2) :][:, :128].abs().amax(1, keepdim=True)
    assert torch.equal(cut.across(own, Tile(1, 128)), of_tile)
    assert torch.equal(cut.across(own, Tile(1, ALL)), x.abs().amax(1, keepdim=True))
    assert torch.equal(cut.across(own, Tile(1, 64)), own)
