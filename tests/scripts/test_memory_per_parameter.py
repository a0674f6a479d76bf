"""The bytes of every parameter, weights to optimizer states, as the script measures them."""

import pytest

from scripts.tables import memory_per_parameter

EXPECTED = {
    "float32 weights": {"weights": 4, "masters": 0, "optimizer states": 8, "codes": 1},
    "bf16 weights, float32 masters": {"weights": 2, "masters": 4, "optimizer states": 8, "codes": 1},
    "float8 primary weights, float32 masters": {
        "weights": 0,
        "masters": 4,
        "optimizer states": 8,
        "codes": 1,
    },
    "frozen float8 primary weights": {"weights": 0, "masters": 0, "optimizer states": 0, "codes": 1},
}
SLACK = 0.02
"""Scales, step counts and the amax table, a few bytes a weight."""


def figures(rank: int, world: int) -> dict[str, dict[str, float]]:
    return memory_per_parameter.figures(world)


@pytest.mark.parametrize("world", [1, 2], ids="world{}".format)
def test_nothing_is_held_twice_and_primary_weights_are_one_byte(ranks, world):
    rows = ranks(world, figures)[0]
    assert rows.keys() == EXPECTED.keys()
    for name, of_one_rank in EXPECTED.items():
        # What is sharded and has a master is cast into what FSDP2 sends, and kept nowhere.
        kept = 1 if world == 1 or name.startswith("frozen") else 0
        expected = {**of_one_rank, "codes": kept}
        for holder, count in {**expected, "other": 0, "total": sum(expected.values())}.items():
            assert rows[name][holder] == pytest.approx(count, abs=SLACK), (name, holder)
