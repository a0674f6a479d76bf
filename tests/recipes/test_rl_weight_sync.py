"""The engine multiplies the weights that training multiplies, after each of its steps."""

from collections.abc import Iterator
from unittest import mock

import pytest
import rl_weight_sync
import torch

import f8sub

pytestmark = pytest.mark.own_ranks


@pytest.mark.parametrize("world", [3])
def test_no_layers_weight_differs(rank, world):
    assert rl_weight_sync.main(5) == ([0] * 5 if rank == 0 else [])


def late(rank: int, world: int) -> list[int]:
    """The engine has the weights of the step before."""
    kept: list[list[tuple[str, torch.Tensor]]] = []

    def before(model: torch.nn.Module, layout: str) -> Iterator[tuple[str, torch.Tensor]]:
        kept.append(list(f8sub.checkpoint.stream.float8_weights(model, layout)))
        return iter(kept[max(len(kept) - 2, 0)])

    with mock.patch.object(f8sub, "float8_weights", before):
        return rl_weight_sync.main(3)


def test_weights_of_a_step_before_are_noticed(ranks):
    assert ranks(3, late)[0] == [0, 14, 14]
