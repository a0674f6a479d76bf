"""The bytes of every parameter, weights to optimizer states, as the script measures them."""

import pytest

from scripts.tables import memory_per_parameter

EXPECTED = {
    "float32 weights": (4, 0, 8),
    "bf16 weights, float32 masters": (2, 4, 8),
    "float8 primary weights, float32 masters": (0, 4, 8),
    "frozen float8 primary weights": (0, 0, 0),
}
"""Bytes of weights, masters and optimizer states."""
SLACK = 0.02
"""Scales, step counts and the amax table, a few bytes a weight."""


@pytest.mark.parametrize("world", [1, 2], ids="world{}".format)
def test_nothing_is_held_twice_and_primary_weights_are_one_byte(rank, world):
    rows = memory_per_parameter.figures(world)
    assert rows.keys() == EXPECTED.keys()
    for name, of_each in EXPECTED.items():
        expected = dict(zip(("weights", "masters", "optimizer states"), of_each, strict=True))
        # What is sharded and has a master is cast into what FSDP2 sends, and kept nowhere.
        expected["codes"] = 1 if world == 1 or name.startswith("frozen") else 0
        for holder, count in {**expected, "other": 0, "total": sum(expected.values())}.items():
            assert rows[name][holder] == pytest.approx(count, abs=SLACK), (name, holder)
