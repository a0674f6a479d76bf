"""The benchmark of whole steps: what its arms are, on a CPU, and what its table compares."""

import argparse

import pytest
import torch
from torch import nn

import f8sub
from f8sub.graphs import recorded
from scripts.bench import graphed
from tests.data_sets import generator
from tests.models import float8_layers

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "vocab_size": 1024}


def options(**given) -> argparse.Namespace:
    usual = {"model": "8b", "layers": 2, "tokens": 16, "sequences": 1, "accumulate": 1, "ac": "none"}
    return argparse.Namespace(
        **{**usual, "max_norm": 1.0, "reshard": True, "tp": 1, "compile": False, **given}
    )


def arm_of(arm: str, **given) -> graphed.Arm:
    with pytest.MonkeyPatch.context() as patch:
        # Eager: compiled code on a CPU takes seconds to make.
        patch.setattr(torch, "compile", lambda function, **_: function)
        patch.setitem(graphed.SIZES, "8b", SMALL)
        patch.setattr(f8sub, "convert_to_float8", all_layers)
        return graphed.Arm(arm, options(**given), torch.device("cpu"))


def losses(arm: str, **given) -> list[float]:
    run = arm_of(arm, **given)
    return [run.launched(batch).item() for batch in run._batches[:3]]


def all_layers(model: nn.Module, **given) -> nn.Module:
    """Small ones, too."""
    return _convert(model, **given, skip_defaults=False)


_convert = f8sub.convert_to_float8


def test_arms_and_their_losses(rank, world):
    """What changes no number changes none; on a CPU torch takes the fused step, and clips as torch does."""
    plain, float8 = losses("bf16"), losses("f8sub.tensorwise")
    assert not float8_layers(arm_of("bf16").model)
    assert len(float8_layers(arm_of("f8sub").model)) == 15
    assert float8[0] == pytest.approx(plain[0], rel=0.05)
    assert float8 != plain
    assert losses("bf16+fused") == plain
    for arm, how in (
        ("f8sub+fused", {}),
        ("f8sub", {"ac": "selective"}),
        ("f8sub+fused", {"ac": "full", "reshard": False}),
        ("f8sub+prefetch", {"ac": "full"}),
    ):
        assert losses(arm, **how) == float8
    clipped = losses("f8sub+fused", max_norm=1e-3)
    assert clipped[0] == float8[0]
    assert clipped[1:] != float8[1:]
    assert losses("f8sub+swiglu") != float8


def batch_of(rank: int) -> torch.Tensor:
    return torch.randint(1000, (1, 1, 17), generator=generator(rank))


def test_micro_batches_are_accumulated(rank, world):
    """Of two equal ones the gradients are those of one: halves are exact."""
    found = []
    for count, reshard in ((1, True), (2, True), (2, False)):
        run = arm_of("f8sub", accumulate=count, reshard=reshard, max_norm=0.0)
        assert run._batches.shape == (8, count, 1, 17)
        run._forward_backward(batch_of(rank).expand(count, -1, -1))
        found.append([parameter.grad.full_tensor() for parameter in run.model.parameters()])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one, other)


def test_unknown_arms():
    with pytest.raises(ValueError, match=r"f8sub\+ac: arms are bf16, f8sub, torchao"):
        graphed.parts_of_arm("f8sub+ac")
    with pytest.raises(ValueError, match="fp8: arms are"):
        graphed.parts_of_arm("fp8")


def test_launches_of_graphs_are_timed(monkeypatch):
    launched = []
    monkeypatch.setattr(recorded.Recorded, "replay", launched.append)
    with graphed.launch_times() as times:
        recorded.Recorded.replay("graph")
    recorded.Recorded.replay("another")
    assert launched == ["graph", "another"]
    assert len(times) == 1
    rounds = [{"steps": [9.0, 3.0, 3.0], "loop": 3.0, "host": [2.0, 1.0], "launches": times, "loss": 0.5}]
    assert 0 <= graphed.summary(rounds)["launch_ms"] < graphed.summary(rounds)["host_ms"]
    assert graphed.summary([{**rounds[0], "launches": []}])["launch_ms"] == 0.0


def test_what_is_compared():
    usual = {"active_gib": 2.0, "reserved_gib": 4.0, "how": "replayed"}
    rows = [
        {"arm": "bf16", "loop_ms": 10.0, **usual},
        {"arm": "bf16+fused", "loop_ms": 9.0, **usual},
        {"arm": "f8sub+fused", "loop_ms": 6.0, **usual, "active_gib": 1.0},
        {"arm": "f8sub", "loop_ms": 8.0, **usual},
        {"arm": "torchao", "how": "failed"},
    ]
    found = graphed.compared(rows)
    assert [row.get("over_bf16") for row in found] == [1.0, 10 / 9, 10 / 6, 10 / 8, None]
    assert [row.get("over_bf16_fused") for row in found] == [None, 1.0, 1.5, None, None]
    assert [row.get("active_over_bf16") for row in found] == [1.0, 1.0, 0.5, 1.0, None]
