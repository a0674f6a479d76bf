"""float8 against bf16 all-gathers between hosts: bytes that the kernel counted, all-reduces. Time is the table's."""

import pytest

from scripts.tables import hosts
from scripts.tables.hosts import ARMS, BF16, COMBINED, SEPARATE
from tests.namespaces import environment, needs_hosts

PROTOCOLS = 1.03
"""TCP's and Ethernet's headers, acknowledgements, and the barriers around what is measured."""
LINEAR_LAYERS = 14


@needs_hosts
@pytest.mark.long
def test_float8_halves_the_all_gather_on_a_limited_link(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    figures = hosts.run(2, "100mbit", rounds=1)
    arms = figures["arms"]
    assert figures["hosts"] == 2
    for name, bytes_an_element in {BF16: 2, SEPARATE: 1, COMBINED: 1}.items():
        share = bytes_an_element * figures["weights"] / 2  # a ring of two: each sends the half that it has
        for direction in ("sent", "received"):
            assert share < arms[name]["gathers"][direction] < PROTOCOLS * share
        # Forward and backward gather; gradients are of the same size for all, whatever was gathered.
        assert arms[name]["steps"]["sent"] - arms[BF16]["steps"]["sent"] == pytest.approx(
            2 * (arms[name]["gathers"]["sent"] - arms[BF16]["gathers"]["sent"]), abs=0.03 * share
        )
    assert [arms[name]["amax_all_reduces"] for name in ARMS] == [0, LINEAR_LAYERS, 1]
    assert figures["idle_sent_a_second"] < 0.01 * arms[COMBINED]["gathers"]["sent"]


def test_arms_that_train_differently_are_not_compared():
    same = {"losses": [2.0, 1.0]}
    with pytest.raises(RuntimeError, match="the arms train different losses"):
        hosts.summary([{BF16: same, SEPARATE: same, COMBINED: {"losses": [2.0, 1.5]}}])


def arm(all_reduces: int, sent: float, seconds: list[float]) -> dict:
    measured = {"seconds": seconds, "sent": sent, "received": sent}
    return {"amax_all_reduces": all_reduces, "gathers": measured, "steps": measured}


def test_float8_is_told_as_shares_of_bf16_turn_by_turn():
    arms = {
        BF16: arm(0, 2e6, [1.0, 2.0, 4.0]),
        SEPARATE: arm(14, 1e6, [0.5, 1.0, 2.0]),
        COMBINED: arm(1, 1e6, [0.4, 1.0, 2.8]),
    }
    first, second, third = hosts.rows({"hosts": 4, "arms": arms}, "1gbit")
    assert first == ["4, 1gbit", "bf16", "0", "2.0 MB", "2.0 MB", "2.00 s", "2.00 s"]
    assert second[2:] == ["14", "0.50", "0.50", *["0.50 (0.50 to 0.50)"] * 2]
    assert third[2:] == ["1", "0.50", "0.50", *["0.50 (0.45 to 0.60)"] * 2]
