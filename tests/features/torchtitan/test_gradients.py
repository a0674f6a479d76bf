"""torchtitan's trainer with float8 reductions of gradients, which are set up at the first forward."""

import pytest

from tests.features.torchtitan.runs import last
from tests.features.torchtitan.test_training import MESHES, mesh

pytestmark = pytest.mark.usefixtures("titan")

GRADIENTS = 'f8sub:{"reduce_gradients_in_float8":true}'


@pytest.mark.parametrize("mesh", [mesh(name) for name in ("fsdp2", "hsdp2x2", "fsdp2-tp2", "fsdp2-pp2")])
def test_losses(train, mesh):
    world, options = MESHES[mesh]
    usual, ours = (last(train(world, f"{config} {options}")) for config in ("f8sub", GRADIENTS))
    assert ours != usual
    assert abs(ours - usual) < 4e-3


@pytest.mark.long
def test_one_rank_reduces_nothing(train):
    assert train(1, GRADIENTS) == train(1, "f8sub")
