"""Ranks that torchrun restarted find the store as the dead ones left it, and agree among themselves all the same."""

import pretrain
import pytest
import torch
import torch.distributed as dist
from f8sub_pretrain.settings import parse

import f8sub
from f8sub.weights import agreement
from tests.data_sets import gaussian, generator
from tests.models import Stack, seed_weights, shard
from tests.wire import ONE_RECIPE_A_WIRE, on_each

# Ranks that start again find a store of their own.
pytestmark = pytest.mark.own_ranks


def life(rank: int, world: int, store: str, recipe: str) -> torch.Tensor:
    """What a model that was changed on all ranks alike, in a way that each can only tell the store, computes."""
    kept = dist.FileStore(store, world)
    agreement.default_store = lambda: kept
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 48)), recipe=recipe))
    x = gaussian((16, 32), generator(1))
    model(x)
    with torch.no_grad():
        model.layers[0].weight.to_local().mul_(8.0)
    y = model(x)
    f8sub.precompute_scales(model)
    assert torch.equal(model(x), y)
    return y.detach()


@on_each(ONE_RECIPE_A_WIRE)
def test_each_life_agrees_for_itself(ranks, tmp_path, recipe):
    lives = [ranks(2, life, str(tmp_path / "store"), recipe) for _ in range(3)]
    for ys in lives:
        for y in ys:
            assert torch.equal(y, lives[0][0])
            assert y.isfinite().all()


@pytest.mark.parametrize(("restarts", "shared"), [("3", "True"), ("3", "False"), ("0", "True")])
def test_the_trainer_tells_of_a_store_that_outlives_its_ranks(monkeypatch, capsys, restarts, shared):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setattr(dist, "init_process_group", lambda **_: None)
    monkeypatch.setattr(pretrain, "init_device_mesh", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with pretrain.joined_ranks(parse(["--training.device", "cpu"])):
        told = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err
    assert told == ((restarts, shared) == ("3", "True"))
